// Asks the server, with the key if there is one, and says in words what went wrong.

import { memory } from "./dom.js";

const KEY = "radixkv.key";
const TIMEOUT_MS = 15_000;

/** Why an answer could not be had. `kind`: down, key, missing, refused or failed. */
export class ApiProblem extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

export class Api {
  #key = memory.get(() => sessionStorage, KEY);

  /** Whether a key is sent. */
  get hasKey() {
    return this.#key !== null;
  }

  /** Use a key from now on, until the tab is closed; null forgets it. */
  useKey(key) {
    this.#key = key;
    memory.set(() => sessionStorage, KEY, key);
  }

  /** Return the JSON under `path`, which is relative to the page. */
  async get(path, { acceptStatus = 0 } = {}) {
    return this.#ask(path, { method: "GET" }, acceptStatus);
  }

  async post(path, body) {
    return this.#ask(path, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
    });
  }

  async #ask(path, options, acceptStatus = 0) {
    const key = this.#key;
    const headers = { Accept: "application/json", ...options.headers };
    if (key !== null) headers.Authorization = `Bearer ${key}`;
    let response;
    let body;
    try {
      response = await fetch(new URL(path, document.baseURI), {
        ...options,
        headers,
        cache: "no-store",
        credentials: "omit",
        redirect: "error",
        signal: AbortSignal.timeout(TIMEOUT_MS),
      });
      body = await response.json().catch((error) => {
        if (error instanceof SyntaxError) return null;
        throw error; // the connection broke in the middle
      });
    } catch (error) {
      const slow = error?.name === "TimeoutError";
      throw new ApiProblem(
        "down",
        slow ? `no answer within ${TIMEOUT_MS / 1000} s` : "the server can't be reached",
      );
    }
    if (response.ok || response.status === acceptStatus) {
      if (body === null) throw new ApiProblem("failed", "the answer isn't JSON");
      return body;
    }
    const said = body?.error?.message ?? `status ${response.status}`;
    // An old answer must not throw away a key that was given since.
    const wantsKey = response.status === 401 || body?.error?.code === "admin_key_required";
    if (wantsKey) throw new ApiProblem(key === this.#key ? "key" : "refused", said);
    if (response.status === 403) throw new ApiProblem("refused", said);
    if (response.status === 404 || response.status === 405) throw new ApiProblem("missing", said);
    throw new ApiProblem("failed", said);
  }
}
