// The page: key, namespaces, dialogues.

import { ask, comparison, isExact } from "./answer.js";
import { dropKey, get, hasKey, keepKey, send as post, tryKey, whenLocked } from "./api.js";
import { setUp as setUpChunks } from "./chunks.js";
import { byId, counted, element, once, shown } from "./dom.js";
import { followUnfinished, setUp } from "./ingest.js";
import { setUp as setUpNamespace } from "./namespace.js";

const NEW = ""; // the option for a namespace that does not exist yet; no namespace has an empty name
// Composed first: its KV never enters the exact prefix cache, while an exact answer would leave the prompt there.
const ORDER = { both: ["auto", "prefix"], prefix: ["prefix"], auto: ["auto"] };
const NOTHING_COMPOSED = "Answered exactly: no composed strategy is verified, measured and faster here.";
const MOST = 12; // messages of the dialogue that go with a question
const RETRY_MS = 2000;
let running = null;
let history = []; // the dialogue's messages, oldest first
let info = null; // the server's; null until it lets us in

const also = () => byId("also").value.split(/[\s,+]+/).filter(Boolean);
const where = () => also().length ? { namespaces: [...new Set([namespace(), ...also()])] } : { namespace: namespace() };
const namespace = () => byId("namespace").value || byId("new-namespace").value.trim() || "default";
const message = (role, content) => ({ role, content });

// Whether the server has single sign-on, and who is signed in.
async function session() {
  return fetch("./sso/session").then((answer) => answer.json()).catch(() => ({}));
}

async function open() {
  try {
    info = await get("/info");
    await list();
  } catch (error) {
    return refused(error);
  }
  const { user } = await session();
  byId("account").hidden = !user && !hasKey();
  byId("user").textContent = hasKey() ? "Opened with an API key." : `Signed in as ${user}.`;
  byId("sign-out").textContent = hasKey() ? "Forget the key" : "Sign out";
  byId("about").textContent = `ragserve ${info.versions.ragserve}, ${info.model.replace(/^\/.*\//, "")}`;
  byId("k").max = byId("set-k").max = info.limits.max_k;
  byId("not-found").hidden = !info.limits.query_log_bytes;
  byId("strategies").replaceChildren(...["auto", ...info.strategies].map((value) => element("option", undefined, undefined, { value })));
  keepKey();
  for (const one of ["login", "sign-in"]) byId(one).hidden = true;
  byId("main").hidden = false;
  followUnfinished().catch(() => {}); // a key may lack the right
}

function refused(error) {
  if (error.status === 401) return; // the key is asked for
  byId("about").textContent = error.message;
  if (error.status === 403) askKey(error.message);
  if (error.status !== 0 && error.status !== 503) return;
  byId("about").append(" Trying again.");
  setTimeout(open, RETRY_MS);
}

async function askKey(why) {
  dropKey();
  byId("account").hidden = true;
  byId("login").hidden = false; // before anything is awaited: other requests may be refused meanwhile
  byId("refused").textContent = why;
  byId("key").focus();
  const { sign_in: offered } = await session();
  byId("sign-in").hidden = !offered || byId("login").hidden;
}

whenLocked(() => {
  if (hasKey()) askKey("This key is wrong, or no longer counts.");
  else if (byId("login").hidden) askKey(info && "Your sign-in has ended.");
  else byId("key").focus(); // it was asked for when an earlier request was refused
});

// Lists the namespaces again. The choice stays where there is one that is still there.
async function list(chosen) {
  const { namespaces } = await get("/rag/namespaces");
  const field = byId("namespace");
  const before = field.options.length ? field.value : undefined;
  const names = [...namespaces.map((one) => one.name), NEW];
  const wanted = chosen ?? before;
  const options = namespaces.map((one) => (
    element("option", `${one.name} (${counted(one.n_documents, "document")})`, undefined, { value: one.name })
  ));
  options.push(element("option", "New namespace", undefined, { value: NEW }));
  field.replaceChildren(...options);
  field.value = names.includes(wanted) ? wanted : names[0];
  if (field.value !== before) moved();
}

// Another namespace is chosen.
function moved() {
  const needed = byId("namespace").value === NEW;
  for (const part of document.querySelectorAll(".new")) part.hidden = !needed;
  if (!needed) byId("new-namespace").value = "";
  begin();
  refresh(true);
}

function begin() {
  running?.abort();
  running = null; // its answer belongs to no dialogue any more
  byId("stop").hidden = true;
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
    const answer = answers[strategy] = await ask(place, { ...body, strategy }, stop.signal, info.limits.feedback_bytes > 0);
    if (!answer) break;
    if (strategy === "auto" && isExact(answer)) {
      compared.textContent = NOTHING_COMPOSED;
      break; // asked exactly, it would be the same answer
    }
  }
  if (running !== stop) return; // another question or dialogue has begun
  running = null;
  byId("stop").hidden = true;
  if (answers.prefix && answers.auto) compared.textContent = comparison(answers.prefix, answers.auto);
  const answer = answers.prefix ?? answers.auto;
  if (answer) history = latest([...history, message("user", asked), message("assistant", answer.answer)]);
  else byId("question").value ||= asked; // to be sent again
}

function latest(messages) {
  const most = Math.min(MOST, info.limits.max_history_messages);
  return most ? messages.slice(-most) : [];
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("refused").textContent = "";
  tryKey(byId("key").value);
  open();
});
byId("sign-out").addEventListener("click", () => once(byId("sign-out"), () => shown(byId("about"), async () => {
  const signedOut = hasKey() ? null : await post("POST", "/sso/logout");
  dropKey();
  location.href = signedOut?.go_to ?? location.href;
})));
byId("namespace").addEventListener("change", moved);
byId("also").addEventListener("change", begin);
byId("anew").addEventListener("click", () => {
  begin();
  byId("question").focus();
});
byId("ask").addEventListener("submit", send);
byId("stop").addEventListener("click", () => {
  running?.abort();
  byId("question").focus();
});
byId("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});
setUp(namespace, () => info.limits, async (name) => {
  await list(namespace() === name ? name : undefined);
  refresh(false);
});
const refresh = setUpNamespace(namespace, list);
setUpChunks();
open();
