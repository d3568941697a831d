// The page: key, namespaces, questions.

import { ask, comparison } from "/playground/answer.js";
import { ApiError, dropKey, get, hasKey, keepKey, tryKey } from "/playground/api.js";
import { byId, element } from "/playground/dom.js";
import { setUp } from "/playground/ingest.js";

const NEW = ""; // the option for a namespace that does not exist yet; no namespace has an empty name
const TITLES = { prefix: "Exact (prefix)", auto: "Composed (auto)" };
// Composed first: its KV never enters the exact prefix cache, while an exact answer would leave the prompt there.
const ORDER = { both: ["auto", "prefix"], prefix: ["prefix"], auto: ["auto"] };
let running = null;

const namespace = () => byId("namespace").value || byId("new-namespace").value.trim() || "default";

async function open() {
  try {
    const info = await get("/info");
    byId("about").textContent = `ragserve ${info.versions.ragserve}, ${info.model}`;
    byId("k").value = info.defaults.k;
    await list();
  } catch (error) {
    const locked = error instanceof ApiError && error.status === 401;
    byId("login").hidden = !locked;
    byId("main").hidden = true;
    byId("refused").textContent = locked && hasKey() ? "This key is wrong." : "";
    if (!locked) byId("about").textContent = error.message;
    if (locked) dropKey();
    return;
  }
  keepKey();
  byId("login").hidden = true;
  byId("main").hidden = false;
}

async function list(chosen) {
  const { namespaces } = await get("/rag/namespaces");
  const options = namespaces.map((one) => {
    const size = one.n_documents === 1 ? "1 document" : `${one.n_documents.toLocaleString("en")} documents`;
    return element("option", `${one.name} (${size})`, undefined, { value: one.name });
  });
  options.push(element("option", "New namespace", undefined, { value: NEW }));
  byId("namespace").replaceChildren(...options);
  byId("namespace").value = chosen ?? namespaces[0]?.name ?? NEW;
  showName();
}

function showName() {
  const needed = byId("namespace").value === NEW;
  for (const part of document.querySelectorAll(".new")) part.hidden = !needed;
}

async function send(event) {
  event.preventDefault();
  running?.abort();
  const stop = running = new AbortController();
  const mode = new FormData(byId("ask")).get("mode");
  const question = { namespace: namespace(), query: byId("question").value, k: Number(byId("k").value) || null };
  const answers = {};
  byId("answers").replaceChildren();
  byId("comparison").textContent = "";
  byId("stop").hidden = false;
  for (const strategy of ORDER[mode]) {
    if (stop.signal.aborted) break;
    answers[strategy] = await ask(byId("answers"), TITLES[strategy], { ...question, strategy }, stop.signal);
  }
  if (running !== stop) return; // another question has begun
  byId("stop").hidden = true;
  if (answers.prefix && answers.auto) byId("comparison").textContent = comparison(answers.prefix, answers.auto);
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  tryKey(byId("key").value);
  open();
});
byId("namespace").addEventListener("change", showName);
byId("ask").addEventListener("submit", send);
byId("stop").addEventListener("click", () => running?.abort());
byId("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});
setUp(namespace, list);
open();
