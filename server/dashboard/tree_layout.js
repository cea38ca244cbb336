// The tree as rectangles: a node is as wide as the tokens in it and below it.

const NARROWEST_PX = 5;

/**
 * Return the top of a model of a report of `/admin/cache/tree`, and its nodes by key.
 *
 * A node has `key`, `kind` ("all", "namespace", "run", "tail", "more" for children the report
 * leaves out), `own` and `total` tokens, `parent`, `children` and `source`, the report's entry.
 * How many tokens left-out children hold is known for a namespace as a whole only; it is shared out
 * among them by number.
 */
export function build(report) {
  const nodes = new Map();
  const add = (node) => {
    nodes.set(node.key, node);
    return node;
  };
  const top = add({ key: "all", kind: "all", own: 0, parent: null, children: [], source: report });
  for (const entry of report.namespaces) {
    const name = `ns:${entry.namespace}`;
    const space = add({
      key: name, kind: "namespace", own: 0, parent: top, children: [], source: entry,
    });
    top.children.push(space);
    const hidden = [];
    let shownBlocks = 0;
    const stack = [[space, entry]];
    while (stack.length) {
      const [node, source] = stack.pop();
      for (const child of source.children) {
        shownBlocks += child.blocks;
        const below = add({
          key: `n:${child.id}`, kind: child.kind, own: child.tokens, parent: node, children: [],
          source: child,
        });
        node.children.push(below);
        stack.push([below, child]);
      }
      if (source.elided_children) {
        const more = add({
          key: `more:${node.key}`, kind: "more", own: 0, parent: node, children: [],
          source: { count: source.elided_children },
        });
        node.children.push(more);
        hidden.push(more);
      }
    }
    const left = Math.max(0, entry.blocks - shownBlocks) * report.block_size;
    const all = hidden.reduce((sum, more) => sum + more.source.count, 0);
    for (const more of hidden) more.own = (left * more.source.count) / all;
  }
  // Deepest first: a node comes after its parent in the map.
  for (const node of [...nodes.values()].reverse()) {
    node.total = node.own + node.children.reduce((sum, child) => sum + child.total, 0);
    node.children.sort((a, b) => b.total - a.total || (a.key < b.key ? -1 : 1));
  }
  return { top, nodes };
}

/** Return a node's ancestors from the top, itself last. */
export function pathTo(node) {
  const path = [];
  for (let at = node; at; at = at.parent) path.unshift(at);
  return path;
}

/** Return a node that stands for several, none of which is wide enough to be drawn. */
export function bundle(parent, members) {
  const total = members.reduce((sum, node) => sum + node.total, 0);
  return {
    key: `small:${parent.key}`, kind: "small", own: 0, total, parent, children: members,
    source: { count: members.length },
  };
}

/**
 * Return cells `{node, row, x, width}` (pixels) for what is below `root`, row by row.
 *
 * Neighbours that would be too narrow to see or to hit are drawn as one bundle.
 */
export function layout(root, widthPx, maxRows) {
  const cells = [{ node: root, row: 0, x: 0, width: widthPx }];
  for (let index = 0; index < cells.length; index += 1) {
    const { node, row, x, width } = cells[index];
    if (row + 1 >= maxRows || !node.total) continue;
    const scale = width / node.total;
    let shown = node.children;
    const small = node.children.filter((child) => child.total * scale < NARROWEST_PX);
    if (small.length > 1) {
      const wide = node.children.filter((child) => child.total * scale >= NARROWEST_PX);
      // A bundle of all children would hide them for good.
      if (wide.length || node.kind !== "small") shown = [...wide, bundle(node, small)];
    }
    let at = x;
    for (const child of shown) {
      const childWidth = child.total * scale;
      cells.push({ node: child, row: row + 1, x: at, width: childWidth });
      at += childWidth;
    }
  }
  return cells;
}
