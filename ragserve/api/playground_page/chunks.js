// A document's chunks: shown, edited, disabled and enabled. And how a file would be cut.

import { call, get, send } from "./api.js";
import { byId, count, counted, element, once, placeOf, shown } from "./dom.js";

const PAGE = 50;
const dialog = byId("chunks");
const list = byId("chunks-list");
const said = byId("chunks-said");
let more = null; // shows the next page
let opened = 0; // what comes for an earlier document is dropped

const report = (act) => shown(said, act);

export function setUp() {
  byId("chunks-close").addEventListener("click", close);
  byId("chunks-more").addEventListener("click", () => once(byId("chunks-more"), () => more?.()));
  dialog.addEventListener("cancel", (event) => { // Escape
    event.preventDefault();
    close();
  });
  const file = byId("preview-file");
  file.addEventListener("change", async () => {
    const [chosen] = file.files;
    if (!chosen) return;
    const own = open(chosen.name, "Cutting the file. Nothing is stored.");
    file.value = "";
    const form = new FormData();
    form.set("file", chosen);
    form.set("limit", "1000");
    await report(async () => {
      const found = await (await call("/rag/ingest/preview", { method: "POST", body: form })).json();
      if (own !== opened) return;
      said.textContent = `${counted(found.n_chunks, "passage")}, ${counted(found.n_tokens, "token")}, at most ${count(found.chunk_tokens)} each.` +
        `${found.note ? ` ${found.note}.` : ""} Nothing is stored.`;
      for (const chunk of found.chunks) element("p", chunk.text, head(chunk), { className: "text" });
      if (found.n_chunks > found.chunks.length) element("li", `The first ${count(found.chunks.length)} are shown.`, list);
    });
  });
}

export async function openChunks(namespace, document) {
  const own = open(document.title || document.source, "");
  const path = `/rag/documents/${encodeURIComponent(document.doc_id)}/chunks`;
  let after = 0;
  more = () => report(async () => {
    const page = await get(`${path}?${new URLSearchParams({ namespace, limit: PAGE, after })}`);
    if (own !== opened) return;
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
  if (!dialog.open) dialog.showModal();
  return opened += 1;
}

// What somebody has typed is not thrown away by a slip.
function close() {
  const typed = [...list.querySelectorAll("textarea")].find((field) => field.value !== field.dataset.was);
  if (!typed) {
    opened += 1;
    dialog.close();
    return;
  }
  said.textContent = "Save the edit or cancel it first.";
  said.className = "error";
  typed.focus();
}

// An entry of the list with the chunk's number, place and size.
function head(chunk, line = element("li", undefined, list)) {
  const facts = [`${chunk.ordinal + 1}`, placeOf(chunk), counted(chunk.n_tokens, "token"),
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
  const change = (control, fields) => once(control, () => report(async () => {
    const asked = new URLSearchParams({ namespace });
    const now = await send("PATCH", `${path}/${chunk.ordinal}?${asked}`, { version: chunk.version, ...fields });
    entry(path, namespace, now, line);
    said.textContent = `Passage ${number} is ${now.disabled ? "in no search" : "searched as shown"}.`;
    line.querySelector("button").focus();
  }));
  const button = (name, act) => {
    const made = element("button", name, line, { type: "button", ariaLabel: `${name} passage ${number}` });
    made.addEventListener("click", () => act(made));
    return made;
  };
  const edit = button("Edit", () => {
    const field = element("textarea", undefined, undefined, { value: chunk.text, rows: 8, ariaLabel: `Text of passage ${number}` });
    field.dataset.was = field.value; // which has the browser's ends of lines
    text.replaceWith(field);
    edit.remove();
    button("Save", (own) => change(own, { text: field.value }));
    button("Cancel", () => {
      entry(path, namespace, chunk, line);
      line.querySelector("button").focus();
    });
    field.focus();
  });
  button(chunk.disabled ? "Enable" : "Disable", (own) => change(own, { disabled: !chunk.disabled }));
  if (chunk.original !== null) button("Restore", (own) => change(own, { text: chunk.original }));
}
