// A namespace's documents, settings, and the questions that it did not answer.

import { get, send } from "/playground/api.js";
import { openChunks } from "/playground/chunks.js";
import { byId, element } from "/playground/dom.js";

const PAGE = 50;
const path = (...parts) => `/rag/${parts.map(encodeURIComponent).join("/")}`;
const when = (seconds) => new Date(seconds * 1000).toLocaleString();

export function setUp(namespace, changed) {
  let after = null;
  const listing = byId("listing");

  async function more() {
    const asked = new URLSearchParams({ namespace: namespace(), limit: PAGE, ...(after === null ? {} : { after }) });
    const { documents, next } = await get(`/rag/documents?${asked}`);
    for (const one of documents) byId("documents").append(entry(one));
    after = next;
    byId("more").hidden = next === null;
    if (!byId("documents").children.length) byId("listed").textContent = "No documents.";
  }

  function entry(one) {
    const line = element("li");
    const size = `${one.n_chunks.toLocaleString("en")} passages, ${one.n_tokens.toLocaleString("en")} tokens`;
    element("span", `${one.title || one.source}`, line, { title: one.source });
    element("small", `indexed ${when(one.updated_at)}, ${size}`, line);
    const passages = element("button", "Passages", line, { type: "button", ariaLabel: `Passages of ${one.title || one.source}` });
    passages.addEventListener("click", () => openChunks(namespace(), one));
    const remove = element("button", "Delete", line, { type: "button", ariaLabel: `Delete ${one.title || one.source}` });
    remove.addEventListener("click", () => shown(async () => {
      if (remove.dataset.sure !== "yes") { // a second press means it
        remove.dataset.sure = "yes";
        remove.textContent = "Delete for good?";
        return;
      }
      const where = new URLSearchParams({ namespace: namespace() });
      await send("DELETE", `${path("documents", one.doc_id)}?${where}`);
      line.remove();
      byId("listed").textContent = `Deleted ${one.title || one.source}.`;
      await changed(namespace());
    }));
    return line;
  }

  async function list() {
    after = null;
    byId("documents").replaceChildren();
    byId("listed").textContent = "";
    await more();
  }

  async function settings() {
    const own = await get(path("namespaces", namespace(), "settings"));
    for (const field of byId("settings").elements) if (field.name) field.value = own[field.name] ?? "";
  }

  async function save() {
    const given = {};
    for (const [name, value] of new FormData(byId("settings"))) {
      if (value !== "") given[name] = ["k", "min_score"].includes(name) ? Number(value) : value;
    }
    await send("PUT", path("namespaces", namespace(), "settings"), given);
    byId("saved").textContent = "Saved.";
  }

  async function questions() {
    const found = await get(`/rag/unanswered?${new URLSearchParams({ namespace: namespace() })}`);
    byId("questions").replaceChildren(...found.questions.map((one) => {
      const line = element("li", one.question);
      element("small", `asked ${one.asked} times, last ${new Date(one.time).toLocaleString()}: ${one.why}`, line);
      return line;
    }));
    if (!found.questions.length) element("li", "Nothing.", byId("questions"));
  }

  // Runs what a control asks for, and says why it failed.
  async function shown(act, said = byId("listed")) {
    said.className = "";
    try {
      await act();
    } catch (error) {
      said.textContent = error.message;
      said.className = "error";
    }
  }

  const parts = [[listing, list, byId("listed")], [byId("own"), settings, byId("saved")], [byId("not-found"), questions, byId("listed")]];
  const refresh = () => parts.forEach(([part, fill, said]) => part.open && shown(fill, said));
  for (const [part, fill, said] of parts) part.addEventListener("toggle", () => part.open && shown(fill, said));
  byId("more").addEventListener("click", () => shown(more));
  byId("namespace").addEventListener("change", () => {
    byId("saved").textContent = "";
    refresh();
  });
  byId("settings").addEventListener("submit", (event) => {
    event.preventDefault();
    shown(save, byId("saved"));
  });
}
