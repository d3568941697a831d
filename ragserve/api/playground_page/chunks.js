// A document's chunks: shown, edited, disabled and enabled. And how a file would be cut.

import { call, get, send } from "/playground/api.js";
import { byId, element, placeOf } from "/playground/dom.js";

const PAGE = 50;
const list = byId("chunks-list");
const said = byId("chunks-said");
let more = null; // shows the next page

export function setUp() {
  byId("chunks-close").addEventListener("click", () => byId("chunks").close());
  byId("chunks-more").addEventListener("click", () => more?.());
  const file = byId("preview-file");
  file.addEventListener("change", async () => {
    const [chosen] = file.files;
    if (!chosen) return;
    open(chosen.name, "How the file would be cut. Nothing is stored.");
    file.value = "";
    const form = new FormData();
    form.set("file", chosen);
    form.set("limit", "1000");
    await report(async () => {
      const found = await (await call("/rag/ingest/preview", { method: "POST", body: form })).json();
      const size = `${found.n_chunks.toLocaleString("en")} passages, ${found.n_tokens.toLocaleString("en")} tokens`;
      said.textContent = `${size}, at most ${found.chunk_tokens} each.${found.note ? ` ${found.note}.` : ""}`;
      for (const chunk of found.chunks) element("p", chunk.text, head(chunk), { className: "text" });
      if (found.n_chunks > found.chunks.length) element("li", `The first ${found.chunks.length} are shown.`, list);
    });
  });
}

export async function openChunks(namespace, document) {
  open(document.title || document.source, "");
  const path = `/rag/documents/${encodeURIComponent(document.doc_id)}/chunks`;
  let after = 0;
  more = () => report(async () => {
    const page = await get(`${path}?${new URLSearchParams({ namespace, limit: PAGE, after })}`);
    for (const chunk of page.chunks) entry(path, namespace, chunk);
    after = page.next;
    byId("chunks-more").hidden = after === null;
    if (!list.children.length) said.textContent = "No passages.";
  });
  await more();
}

function open(title, words) {
  byId("chunks-title").textContent = title;
  said.textContent = words;
  said.className = "";
  list.replaceChildren();
  byId("chunks-more").hidden = true;
  more = null;
  if (!byId("chunks").open) byId("chunks").showModal();
}

// Runs what a control asks for, and says why it failed.
async function report(act) {
  try {
    await act();
  } catch (error) {
    said.textContent = error.message;
    said.className = "error";
  }
}

// An entry of the list with the chunk's number, place and size.
function head(chunk, line = element("li", undefined, list)) {
  const facts = [`${chunk.ordinal + 1}`, placeOf(chunk), `${chunk.n_tokens} tokens`,
    chunk.edited ? "edited" : "", chunk.disabled ? "disabled" : ""];
  element("small", facts.filter(Boolean).join(", "), line);
  return line;
}

// Shows a chunk with its controls; a key that may not change it has got no version.
function entry(path, namespace, chunk, line = element("li", undefined, list)) {
  line.replaceChildren();
  line.classList.toggle("off", chunk.disabled);
  head(chunk, line);
  const text = element("p", chunk.text, line, { className: "text" });
  if (chunk.version === null) return;
  const number = chunk.ordinal + 1;
  const change = (fields) => report(async () => {
    const asked = new URLSearchParams({ namespace });
    const now = await send("PATCH", `${path}/${chunk.ordinal}?${asked}`, { version: chunk.version, ...fields });
    entry(path, namespace, now, line);
    said.textContent = `Passage ${number} is ${now.disabled ? "in no search" : "searched as shown"}.`;
    said.className = "";
    line.querySelector("button").focus();
  });
  const button = (name, act) => {
    const made = element("button", name, line, { type: "button", ariaLabel: `${name} passage ${number}` });
    made.addEventListener("click", act);
    return made;
  };
  const edit = button("Edit", () => {
    const field = element("textarea", undefined, undefined, { value: chunk.text, rows: 8, ariaLabel: `Text of passage ${number}` });
    text.replaceWith(field);
    edit.remove();
    button("Save", () => change({ text: field.value }));
    button("Cancel", () => entry(path, namespace, chunk, line));
    field.focus();
  });
  button(chunk.disabled ? "Enable" : "Disable", () => change({ disabled: !chunk.disabled }));
  if (chunk.original !== null) button("Restore", () => change({ text: chunk.original }));
}
