// An answer: streamed text with citations, tokens by tier, a bar of stages, and what to do with it.

import { query, send } from "./api.js";
import { bar, count, element, ms, once, placeOf, shown } from "./dom.js";
import { openSource } from "./source.js";

const MARKER = /\[(\d{1,3})\]/;

// The title of an answer that was asked for as ``strategy``: composed only if it was.
const EXACT = ["prefix", "full", "passages"];
export const isExact = (answer) => EXACT.includes(answer.context.strategy);
const titleOf = (answer) => `${isExact(answer) ? "Exact" : "Composed"} (${answer.context.strategy})`;

// Asks and shows in a new article. Resolves to the answer, or to null if it failed or was stopped.
export async function ask(parent, body, signal, rates) {
  const article = element("article", undefined, parent);
  const title = element("h3", "Answering", article);
  const text = element("p", undefined, article, { className: "text", ariaLive: "polite", ariaBusy: "true" });
  const details = element("div", undefined, article);
  let answer = null;
  try {
    for await (const [event, data] of query(body, signal)) {
      if (event === "message") text.append(data.text);
      if (event === "final_answer") answer = data;
    }
    title.textContent = titleOf(answer);
    fill(text, details, answer, body.query);
    offer(details, body, answer, rates);
  } catch (error) {
    answer = null;
    title.textContent = "No answer";
    const stopped = error.name === "AbortError";
    element("p", stopped ? "Stopped." : error.message, details, { className: "error", role: "alert" });
  } finally {
    text.ariaBusy = "false";
  }
  return answer;
}

function fill(text, details, answer, asked) {
  text.replaceChildren();
  const characters = Array.from(answer.answer); // places count code points, not UTF-16 units
  const cited = new Map(answer.citations.map((citation) => [citation.index, citation]));
  let at = 0;
  for (const sentence of answer.sentences) {
    text.append(characters.slice(at, sentence.start).join(""));
    const part = element("span", undefined, text, { className: sentence.supported ? "" : "unsupported" });
    marked(part, answer, cited, characters.slice(sentence.start, sentence.end).join(""));
    if (sentence.basis !== "marker") {
      for (const index of sentence.passages) part.append(" ", sourceButton(answer, cited.get(index), `[${index}]`, "cite"));
    }
    if (!sentence.supported) element("small", " (no source)", part);
    at = sentence.end;
  }
  text.append(characters.slice(at).join(""));
  const { context, timings, usage, evidence } = answer;
  const doubt = evidence && !evidence.likely ? `The documents may not answer this: ${evidence.reason}.` : "";
  if (doubt) element("p", doubt, details, { className: "doubt" });
  for (const { original, replacement, read } of answer.searched_for?.corrections ?? []) {
    element("p", `${read ? "Read" : "Searched for"} “${original}” as “${replacement}”.`, details, { className: "notes" });
  }
  if (answer.searched_for?.follow_up && answer.searched_for.question !== asked) {
    element("p", `Searched for “${answer.searched_for.question}”.`, details, { className: "notes" });
  }
  element("h4", "Sources", details);
  const list = element("ul", undefined, details, { className: "sources" });
  for (const citation of answer.citations) {
    const place = placeOf(citation);
    const page = `${place && `, ${place}`}${citation.edited ? ", edited" : ""}`;
    element("li", undefined, list).append(sourceButton(answer, citation, `[${citation.index}] ${citation.title}${page}`, ""));
  }
  const names = ["device", "host", "disk", "computed"];
  const tiers = names.map((tier, n) => [tier, context.tokens_by_tier[tier] ?? 0, `c${n}`]);
  bar(details, "Document tokens by tier", tiers, count);
  bar(details, "Stages", stages(timings), ms);
  const first = timings.ttft_ms === null ? "" : `first token ${ms(timings.ttft_ms)}, `;
  element(
    "p",
    `${first}total ${ms(timings.total_ms)}. Tokens: ${count(usage.prompt)} prompt, ${count(usage.cached)} of them ` +
      `cached, ${count(usage.completion)} answer. Strategy ${context.strategy}.`,
    details,
  );
  for (const note of [context.choice, ...context.notes]) {
    if (note && note !== doubt) element("p", note, details, { className: "notes" });
  }
}

// Puts a text with its markers, those of citations as buttons.
function marked(parent, answer, cited, said) {
  said.split(MARKER).forEach((part, place) => {
    const citation = place % 2 ? cited.get(Number(part)) : undefined; // the odd parts are numbers
    if (citation) parent.append(sourceButton(answer, citation, `[${part}]`, "cite"));
    else parent.append(place % 2 ? `[${part}]` : part);
  });
}

// Buttons to copy an answer, and to rate it where the server keeps ratings.
function offer(parent, body, answer, rates) {
  const row = element("div", undefined, parent, { className: "row" });
  const said = element("span", undefined, row, { role: "status" });
  const button = (label, act) => {
    const made = element("button", label, undefined, { type: "button" });
    made.addEventListener("click", () => once(made, () => shown(said, async () => {
      said.textContent = await act(made);
    })));
    said.before(made);
    return made;
  };
  button("Copy", async () => {
    await copy(answer.answer);
    return "Copied.";
  });
  if (!rates) return;
  const documents = [...new Set(answer.citations.map((one) => one.doc_id ?? one.source).filter(Boolean))];
  const rate = (rating) => async (pressed) => {
    const names = answer.namespace.split("+");
    const where = names.length > 1 ? { namespaces: names } : { namespace: answer.namespace };
    const said = { rating, query: body.query, answer: answer.answer, documents, answer_id: answer.request_id };
    await send("POST", "/rag/feedback", { ...where, ...said });
    for (const one of thumbs) one.ariaPressed = String(one === pressed); // the last rating counts
    return "Thank you.";
  };
  const thumbs = [button("Good answer", rate("up")), button("Wrong answer", rate("down"))];
}

// The clipboard is for secure origins only: elsewhere the old way.
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = element("textarea", undefined, document.body, { value: text });
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  if (!done) throw new Error("The browser does not let this page copy.");
}

function sourceButton(answer, citation, label, className) {
  const button = element("button", label, undefined, { type: "button", className });
  button.ariaLabel = `Source ${citation.index}: ${citation.title}`;
  button.addEventListener("click", () => openSource(citation.namespace ?? answer.namespace, citation));
  return button;
}

// The stages of an answer, which add up to its total. Loading is part of the engine's queue time, and
// composing and recomputing of its prefill time.
export function stages(timings) {
  const of = (name) => timings[`${name}_ms`] ?? 0;
  const rest = (whole, ...parts) => Math.max(0, parts.reduce((left, part) => left - of(part), whole));
  const parts = [
    ["rewrite", of("rewrite")], ["embed", of("embed")], ["search", of("search")],
    ["rerank", of("rerank")], ["prompt", of("prompt")],
    ["documents", of("documents")],
    ["queue", rest(of("queue"), "load")], ["load", of("load")], ["compose", of("compose")],
    ["recompute", of("recompute")], ["prefill", rest(of("prefill"), "compose", "recompute")],
  ];
  const known = parts.reduce((sum, [, value]) => sum + value, 0);
  const first = timings.ttft_ms ?? timings.total_ms;
  return [...parts, ["other", Math.max(0, first - known)], ["decode", Math.max(0, timings.total_ms - first)]]
    .map(([name, value], place) => [name, value, `c${place}`]);
}

// A sentence about the same question answered exactly and composed.
export function comparison(exact, composed) {
  const [a, b] = [exact.timings.ttft_ms ?? exact.timings.total_ms, composed.timings.ttft_ms ?? composed.timings.total_ms];
  const times = a > b ? `${(a / b).toFixed(1)} times sooner` : `${(b / a).toFixed(1)} times later`;
  const computed = (answer) => count(answer.context.tokens_recomputed);
  return `Composed (${composed.context.strategy}): first token ${ms(b)}, ${times} than exact (${ms(a)}); ` +
    `document tokens computed ${computed(composed)} and ${computed(exact)}, kept in KV ` +
    `${count(composed.context.tokens_kept)} and ${count(exact.context.tokens_kept)}.`;
}
