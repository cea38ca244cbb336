// Text of prompts: on one line, with what is invisible made visible, and compared.

const MARKS = new Map([["\t", "⇥"], ["\r", "␍"], ["\u00a0", "⍽"], ["\u200b", "∅"], ["\ufeff", "∅"]]);

/** Return the text in one line for a label, without the marks of chat templates. */
export function oneLine(text) {
  const plain = text.replace(/<\|[^|<>]{1,40}\|>/g, " ").replace(/\s+/g, " ").trim();
  return plain || text.trim();
}

/** Return the text with marks for line breaks and for what can't be seen. */
export function visible(text) {
  return text.replace(/[\t\r\u00a0\u200b\ufeff]/g, (one) => MARKS.get(one)).replace(/\n/g, "↵\n");
}

/** Return how many characters two texts have in common at their beginning. */
export function commonLength(a, b) {
  const most = Math.min(a.length, b.length);
  let length = 0;
  while (length < most && a[length] === b[length]) length += 1;
  // Not between the halves of one character.
  if (length && length < most && /[\ud800-\udbff]/.test(a[length - 1])) length -= 1;
  return length;
}

const ANCHOR = 10; // characters alike that count as going on alike
const REACH = 48;

const MARK = /<\|(?!\s)|<\/?s>|\[\/?INST\]|<(?:start|end)_of_turn>/;

/** Return the length of what is left of the message that a text begins in. */
export function messageLength(text) {
  const at = text.search(MARK);
  return at < 0 ? text.length : at;
}

/**
 * Return the lengths `[a, b]` of what two texts have before they go on alike in the same message, the
 * shortest such; null if they don't within sight.
 */
export function detour(text, otherText) {
  const [one, other] = [text, otherText].map((whole) => whole.slice(0, messageLength(whole)));
  for (let sum = 1; sum <= 2 * REACH; sum += 1) {
    for (let a = Math.max(0, sum - REACH); a <= Math.min(sum, REACH); a += 1) {
      const anchor = one.slice(a, a + ANCHOR);
      if (anchor.length < ANCHOR) break;
      if (other.startsWith(anchor, sum - a)) return [a, sum - a];
    }
  }
  return null;
}

const KINDS = [
  [/\d{4}-\d\d-\d\d|\d{1,2}:\d\d(?::\d\d)?|\b(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*day\b|\b(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\b \d|\d \b(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)/i, "a date or a time"],
  [/[0-9a-f]{8}-[0-9a-f]{4}-|\b[0-9a-f]{16,}\b/i, "an id"],
  [/\d/, "a number"],
];

/**
 * Say what kind of thing two texts differ in, if it is one that often changes by itself; else null.
 * Both come with what stands before the difference.
 */
export function kindOfDifference(before, one, other) {
  const squeezed = [one, other].map((text) => text.replace(/\s+/g, ""));
  const most = Math.min(squeezed[0].length, squeezed[1].length, 12);
  if (most && squeezed[0].slice(0, most) === squeezed[1].slice(0, most)) return "white space";
  if (one.slice(0, 12).toLowerCase() === other.slice(0, 12).toLowerCase()) return "upper and lower case";
  const near = before.slice(-24);
  for (const [pattern, name] of KINDS) {
    // It has to reach over the place where they part, or stand just there.
    if ([one, other].every((text) => reaches(pattern, near, text.slice(0, 24)))) return name;
  }
  return null;
}

function reaches(pattern, near, text) {
  const all = new RegExp(pattern.source, `${pattern.flags.replace("g", "")}g`);
  for (const match of (near + text).matchAll(all)) {
    if (match.index <= near.length + 1 && match.index + match[0].length >= near.length) return true;
  }
  return false;
}
