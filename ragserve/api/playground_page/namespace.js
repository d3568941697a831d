// A namespace's documents, settings, measured strategies, and the questions that it did not answer.

import { get, send } from "./api.js";
import { openChunks } from "./chunks.js";
import { byId, count, counted, element, once, shown } from "./dom.js";
import { show as showMeasured } from "./measured.js";

const PAGE = 50;
const TYPING_MS = 300;
const path = (...parts) => `/rag/${parts.map(encodeURIComponent).join("/")}`;
const when = (seconds) => new Date(seconds * 1000).toLocaleString();

// Returns what fills the open parts again; with ``moved`` for another namespace.
export function setUp(namespace, changed) {
  let after = null;
  let listing = 0; // of the list that is shown: what comes for an earlier one is dropped

  async function more() {
    const own = listing;
    const prefix = byId("begins").value;
    const asked = new URLSearchParams({ namespace: namespace(), limit: PAGE, ...(prefix && { source_prefix: prefix }), ...(after !== null && { after }) });
    const { documents, next } = await get(`/rag/documents?${asked}`);
    if (own !== listing) return;
    for (const one of documents) byId("documents").append(entry(one));
    after = next;
    byId("more").hidden = next === null;
    if (!byId("documents").children.length) byId("listed").textContent = prefix ? "No source begins so." : "No documents.";
  }

  async function list() {
    listing += 1;
    after = null;
    byId("documents").replaceChildren();
    byId("more").hidden = true;
    await more();
  }

  function entry(one) {
    const name = one.title || one.source;
    const line = element("li");
    element("bdi", name, line);
    const facts = [one.source === name ? "" : one.source, `indexed ${when(one.updated_at)}`, counted(one.n_chunks, "passage"),
      counted(one.n_tokens, "token"), one.labels.length ? `for ${one.labels.join(", ")}` : ""];
    element("small", facts.filter(Boolean).join(", "), line);
    const passages = element("button", "Passages", line, { type: "button", ariaLabel: `Passages of ${name}` });
    passages.addEventListener("click", () => openChunks(namespace(), one));
    const remove = element("button", "Delete", line, { type: "button", ariaLabel: `Delete ${name}` });
    const sure = (yes) => {
      remove.textContent = yes ? "Delete for good?" : "Delete";
      remove.ariaLabel = `${remove.textContent} ${name}`;
      remove.dataset.sure = yes ? "yes" : "";
    };
    remove.addEventListener("blur", () => sure(false));
    remove.addEventListener("click", (event) => once(remove, () => shown(byId("listed"), async () => {
      if (!remove.dataset.sure) return sure(true);
      if (event.detail > 1) return undefined; // a double click is one press
      const where = new URLSearchParams({ namespace: namespace() });
      await send("DELETE", `${path("documents", one.doc_id)}?${where}`);
      const next = (line.nextElementSibling ?? line.previousElementSibling)?.querySelector("button");
      line.remove();
      byId("listed").textContent = `Deleted ${name}.`;
      (next ?? byId("listing").querySelector("summary")).focus();
      return changed();
    })));
    return line;
  }

  const fields = byId("settings").querySelector("fieldset");

  async function settings() {
    byId("settings").reset();
    fields.disabled = true; // until they are this namespace's
    const name = namespace();
    const own = await get(path("namespaces", name, "settings"));
    if (name !== namespace()) return;
    for (const field of fields.elements) if (field.name) field.value = own[field.name] ?? "";
    fields.disabled = false;
  }

  async function save() {
    if (fields.disabled) return; // nothing is known of them
    const given = {};
    for (const [name, value] of new FormData(byId("settings"))) {
      if (value !== "") given[name] = ["k", "min_score"].includes(name) ? Number(value) : value;
    }
    await send("PUT", path("namespaces", namespace(), "settings"), given);
    byId("saved").textContent = "Saved.";
  }

  async function questions() {
    const name = namespace();
    const found = await get(`/rag/unanswered?${new URLSearchParams({ namespace: name })}`);
    if (name !== namespace()) return;
    byId("questions").replaceChildren(...found.questions.map((one) => {
      const line = element("li");
      element("bdi", one.question, line);
      element("small", `asked ${counted(one.asked, "time")}, last ${new Date(one.time).toLocaleString()}: ${one.why}`, line);
      return line;
    }));
    byId("unanswered").textContent = found.questions.length ? "" : "Nothing.";
  }

  async function measured() {
    const name = namespace();
    const { verification } = await get("/info");
    if (name === namespace()) showMeasured(name, verification);
  }

  // Part, what fills it, where it says what happened.
  const parts = [
    [byId("listing"), list, byId("listed")],
    [byId("own"), settings, byId("saved")],
    [byId("measured"), measured, byId("measured-said")],
    [byId("not-found"), questions, byId("unanswered")],
  ];
  const fill = ([, act, said]) => {
    said.textContent = "";
    return shown(said, act);
  };
  for (const part of parts) part[0].addEventListener("toggle", () => part[0].open && fill(part));
  byId("more").addEventListener("click", () => once(byId("more"), () => shown(byId("listed"), more)));
  let typing;
  byId("begins").addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => fill(parts[0]), TYPING_MS);
  });
  byId("settings").addEventListener("submit", (event) => {
    event.preventDefault();
    once(byId("save"), () => shown(byId("saved"), save));
  });
  return (moved) => {
    if (moved) byId("begins").value = "";
    for (const part of parts) if (part[0].open && (moved || part[0] !== byId("own"))) fill(part); // no typed setting is lost
  };
}
