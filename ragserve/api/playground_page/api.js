// Calls the server that this page comes from, with the API key if it has one.

const STORED = "ragserve-key"; // as /docs keeps it
let key = sessionStorage.getItem(STORED) || "";

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

export async function call(path, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new ApiError(response.status, message(body, `The server answered ${response.status}.`));
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
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  let ended = false;
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
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
  if (!ended) throw new ApiError(200, "The connection ended before the answer did.");
}
