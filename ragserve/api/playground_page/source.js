// Shows a citation at its place in the text of its document.

import { get } from "./api.js";
import { byId, element, placeOf } from "./dom.js";

let opened = 0; // what comes for an earlier citation is dropped

byId("close").addEventListener("click", () => byId("source").close());

export async function openSource(namespace, citation) {
  const own = opened += 1;
  const text = byId("source-text");
  byId("source-title").textContent = citation.title || citation.source || "Document";
  const place = placeOf(citation);
  const page = place && `${place}, `;
  const source = citation.source === null ? "sent with the question" : `${namespace}, ${citation.source}`;
  byId("source-place").textContent = `${source}: ${page}characters ` +
    `${citation.start} to ${citation.end}${citation.edited ? ", edited" : ""}`;
  text.replaceChildren();
  byId("source").showModal();
  let chunks = [];
  try {
    if (citation.doc_id !== null) chunks = await chunksOf(namespace, citation.doc_id);
    if (own !== opened) return;
  } catch (error) {
    if (own !== opened) return;
    element("p", `The document cannot be shown: ${error.message}`, text, { className: "error", role: "alert" });
  }
  chunks = chunks.filter((chunk) => !chunk.disabled);
  if (!chunks.some((chunk) => chunk.chunk_id === citation.chunk_id)) chunks = [citation]; // replaced meanwhile
  const mark = fill(text, chunks, citation);
  mark.scrollIntoView({ block: "center" });
  mark.focus({ preventScroll: true });
}

async function chunksOf(namespace, docId) {
  const found = [];
  for (let after = 0; after !== null;) {
    const asked = new URLSearchParams({ namespace, limit: 1000, after });
    const page = await get(`/rag/documents/${encodeURIComponent(docId)}/chunks?${asked}`);
    found.push(...page.chunks);
    after = page.next;
  }
  return found;
}

// Joins chunks by their offsets, which count code points: strings are cut by those, not by UTF-16 units.
function fill(parent, chunks, citation) {
  let until = chunks[0].start;
  let marked;
  for (const chunk of chunks) {
    if (chunk.start > until) parent.append("\n");
    // the copy of a table's header at its beginning is no part of the document here
    const own = Array.from(chunk.text);
    const text = chunk.edited ? chunk.text : own.slice(chunk.header_chars + Math.max(0, until - chunk.start)).join("");
    if (chunk.chunk_id === citation.chunk_id) marked = element("mark", text, parent, { tabIndex: -1 });
    else parent.append(text);
    until = Math.max(until, chunk.end);
  }
  return marked;
}
