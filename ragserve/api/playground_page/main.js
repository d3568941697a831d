// The page: key, namespaces, dialogues.

import { ask, comparison, isExact } from "/playground/answer.js";
import { ApiError, dropKey, get, hasKey, keepKey, send as post, tryKey } from "/playground/api.js";
import { setUp as setUpChunks } from "/playground/chunks.js";
import { byId, element } from "/playground/dom.js";
import { setUp } from "/playground/ingest.js";
import { setUp as setUpNamespace } from "/playground/namespace.js";

const NEW = ""; // the option for a namespace that does not exist yet; no namespace has an empty name
// Composed first: its KV never enters the exact prefix cache, while an exact answer would leave the prompt there.
const ORDER = { both: ["auto", "prefix"], prefix: ["prefix"], auto: ["auto"] };
const NOTHING_COMPOSED = "Answered exactly: no composed strategy is verified, measured and faster here.";
let running = null;
let history = []; // the dialogue's messages, oldest first
let rates = false; // whether the server keeps ratings

const also = () => byId("also").value.split(/[\s,+]+/).filter(Boolean);
const where = () => also().length ? { namespaces: [...new Set([namespace(), ...also()])] } : { namespace: namespace() };
const namespace = () => byId("namespace").value || byId("new-namespace").value.trim() || "default";

// Who is signed in, where the server has single sign-on.
async function account() {
  const { sign_in: offered, user } = await fetch("/sso/session").then((answer) => answer.json()).catch(() => ({}));
  byId("account").hidden = !user || hasKey();
  byId("user").textContent = user ? `Signed in as ${user}.` : "";
  return offered && !user;
}

async function open() {
  const offered = await account();
  byId("sign-in").hidden = true;
  try {
    const info = await get("/info");
    byId("about").textContent = `ragserve ${info.versions.ragserve}, ${info.model}`;
    byId("k").placeholder = info.defaults.k;
    rates = info.limits.feedback_bytes > 0;
    byId("not-found").hidden = !info.limits.query_log_bytes;
    await list();
  } catch (error) {
    const locked = error instanceof ApiError && error.status === 401;
    byId("login").hidden = !locked;
    byId("sign-in").hidden = !locked || !offered;
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

function begin() {
  running?.abort();
  history = [];
  byId("dialogue").replaceChildren();
  byId("anew").hidden = true;
}

async function send(event) {
  event.preventDefault();
  running?.abort();
  const stop = running = new AbortController();
  const mode = new FormData(byId("ask")).get("mode");
  const asked = byId("question").value;
  const body = { ...where(), query: asked, history, k: Number(byId("k").value) || null };
  const turn = element("section", undefined, undefined, { className: "turn" });
  element("h3", asked, turn, { className: "asked" });
  const compared = element("p", undefined, turn, { className: "comparison", role: "status" });
  const place = element("div", undefined, turn, { className: "answers" });
  byId("dialogue").prepend(turn);
  byId("question").value = "";
  byId("stop").hidden = false;
  byId("anew").hidden = false;
  const answers = {};
  for (const strategy of ORDER[mode]) {
    if (stop.signal.aborted) break;
    const answer = answers[strategy] = await ask(place, { ...body, strategy }, stop.signal, rates);
    if (answer && strategy === "auto" && isExact(answer)) {
      compared.textContent = NOTHING_COMPOSED;
      break; // asked exactly, it would be the same answer
    }
  }
  if (running !== stop) return; // another question has begun
  byId("stop").hidden = true;
  if (answers.prefix && answers.auto) compared.textContent = comparison(answers.prefix, answers.auto);
  const answer = answers.prefix ?? answers.auto;
  if (answer) history = [...history, message("user", asked), message("assistant", answer.answer)].slice(-MOST);
}

const MOST = 12; // messages of the dialogue that go with a question
const message = (role, content) => ({ role, content });

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  tryKey(byId("key").value);
  open();
});
byId("sign-out").addEventListener("click", async () => {
  location.href = (await post("POST", "/sso/logout")).go_to;
});
byId("namespace").addEventListener("change", () => {
  showName();
  begin();
});
byId("also").addEventListener("change", begin);
byId("anew").addEventListener("click", begin);
byId("ask").addEventListener("submit", send);
byId("stop").addEventListener("click", () => running?.abort());
byId("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});
setUp(namespace, list);
setUpNamespace(namespace, list);
setUpChunks();
open();
