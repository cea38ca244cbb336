// Keeps the page's data fresh: each feed asks again after a while, sooner or later as is polite.

const LOAD_SHARE = 20; // a feed whose answer took t seconds waits at least so many times t
const PATIENCE_S = 20;

/**
 * One source of data. `load` returns it, `show(data)` draws it; `section`, if given, is the element
 * that must be near the screen for anything to be asked after the first time; a failed attempt is
 * repeated after `patienceS` at the latest.
 */
class Feed {
  constructor({ name, everyS, load, show, section = null, patienceS = PATIENCE_S }) {
    Object.assign(this, { name, everyS, load, show, section, patienceS });
    this.data = null;
    this.loadedAt = null; // seconds since 1970
    this.problem = null;
    this.failures = 0;
    this.dueAt = 0; // milliseconds of performance.now()
    this.busy = false;
    this.inSight = section === null;
    this.once = true; // due whether in sight or not: at first, and when asked for by name
  }
}

export class Feeds {
  #feeds = new Map();
  #timer = null;
  #onChange;
  #generation = 0;
  #observer = new IntersectionObserver((entries) => this.#seen(entries), { rootMargin: "300px" });

  paused = false;

  /** `onChange(feed)` is called after each attempt, whatever came of it. */
  constructor(onChange) {
    this.#onChange = onChange;
    document.addEventListener("visibilitychange", () => this.#tick());
  }

  add(options) {
    const feed = new Feed(options);
    this.#feeds.set(feed.name, feed);
    if (feed.section) this.#observer.observe(feed.section);
    return feed;
  }

  get(name) {
    return this.#feeds.get(name);
  }

  all() {
    return [...this.#feeds.values()];
  }

  start() {
    this.#timer ??= setInterval(() => this.#tick(), 250);
    this.#tick();
  }

  /** Ask for one feed, or for all, now. Answers to earlier questions no longer count. */
  refresh(name = null) {
    if (name === null) this.#generation += 1;
    for (const feed of name === null ? this.all() : [this.get(name)]) {
      feed.dueAt = 0;
      feed.once = true;
      if (name === null) feed.busy = false;
    }
    this.#tick();
  }

  #seen(entries) {
    for (const entry of entries) {
      for (const feed of this.#feeds.values()) {
        if (feed.section === entry.target) feed.inSight = entry.isIntersecting;
      }
    }
    this.#tick();
  }

  #tick() {
    if (document.hidden || this.#timer === null) return;
    const now = performance.now();
    for (const feed of this.#feeds.values()) {
      if (feed.busy || feed.dueAt > now) continue;
      if (feed.once || (!this.paused && feed.inSight)) this.#ask(feed);
    }
  }

  async #ask(feed) {
    const generation = this.#generation;
    const started = performance.now();
    feed.busy = true;
    feed.once = false;
    let failed = null;
    let data = null;
    try {
      data = await feed.load();
    } catch (error) {
      failed = error;
    }
    if (generation !== this.#generation) return; // asked again meanwhile, perhaps with another key
    feed.busy = false;
    const took = (performance.now() - started) / 1000;
    feed.problem = failed;
    if (failed === null) {
      feed.failures = 0;
      feed.data = data;
      feed.loadedAt = Date.now() / 1000;
      feed.dueAt = performance.now() + 1000 * Math.max(feed.everyS, LOAD_SHARE * took);
      feed.show(data);
    } else {
      feed.failures += 1;
      const wait = failed.kind === "down" ? Math.min(2 ** feed.failures / 2, feed.patienceS) : feed.patienceS;
      feed.dueAt = performance.now() + 1000 * wait;
    }
    if (feed.once) feed.dueAt = 0; // asked for again meanwhile
    this.#onChange(feed);
  }
}
