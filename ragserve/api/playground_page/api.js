// Calls the server that this page comes from, with the API key if it has one.

const STORED = "ragserve-key"; // as /docs keeps it
const GONE = "The server cannot be reached. It may have ended: see where it was started.";
let key = sessionStorage.getItem(STORED) || "";
let locked = () => {};

// ``status`` is 0 where no answer came.
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => key !== "";
export const tryKey = (value) => { key = value; };
export const keepKey = () => { if (key) sessionStorage.setItem(STORED, key); };
export function dropKey() {
  key = "";
  sessionStorage.removeItem(STORED);
}

// Has ``act`` run whenever the server refuses a request for want of a key or a session.
export const whenLocked = (act) => { locked = act; };

// ``path`` is below whatever path a proxy serves the page at.
export async function call(path, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await answered(() => fetch(`.${path}`, { ...options, headers }));
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  if (response.status === 401) locked();
  throw new ApiError(response.status, message(body, `The server answered ${response.status}.`));
}

// Awaits what the network does, and says in words that it failed.
async function answered(act, otherwise = GONE) {
  try {
    return await act();
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError(0, otherwise);
  }
}

export const get = async (path) => (await call(path)).json();

// Sends JSON and returns the JSON that comes back.
export const send = async (method, path, body) => (await call(path, {
  method,
  headers: { "Content-Type": "application/json" },
  ...(body === undefined ? {} : { body: JSON.stringify(body) }),
})).json();

const message = (body, otherwise) => body.error?.message ?? otherwise;

// Yields [event, data] of a query's server-sent events. Throws the error of an `error` event.
export async function* query(body, signal) {
  const response = await call("/rag/query", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  const ENDED = "The connection ended before the answer did.";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const read = () => answered(() => reader.read(), ENDED);
  let waiting = "";
  let ended = false;
  for (let part = await read(); !part.done; part = await read()) {
    const blocks = (waiting + part.value).split(/\r?\n\r?\n/);
    waiting = blocks.pop();
    for (const block of blocks) {
      const field = (name) => block.split(/\r?\n/).filter((line) => line.startsWith(`${name}:`))
        .map((line) => line.slice(name.length + 1).trimStart()).join("\n");
      const event = field("event");
      if (!event) continue; // a comment that keeps the connection open
      const data = JSON.parse(field("data"));
      if (event === "error") throw new ApiError(200, message(data, "The answer failed."));
      ended ||= event === "done";
      yield [event, data];
    }
  }
  if (!ended) throw new ApiError(0, ENDED);
}
