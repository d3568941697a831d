// An answer: streamed text with citations, tokens by tier, and a bar of stages.

import { query } from "/playground/api.js";
import { bar, element, placeOf } from "/playground/dom.js";
import { openSource } from "/playground/source.js";

const MARKER = /\[(\d{1,3})\]/;
const count = (value) => value.toLocaleString("en");
const ms = (value) => `${value < 10 ? value.toFixed(1) : count(Math.round(value))} ms`;

// Asks and shows in a new article. Resolves to the answer, or to null if it failed or was stopped.
export async function ask(parent, title, body, signal) {
  const article = element("article", undefined, parent);
  element("h3", title, article);
  const text = element("p", undefined, article, { className: "text", ariaLive: "polite", ariaBusy: "true" });
  const details = element("div", undefined, article);
  let answer = null;
  try {
    for await (const [event, data] of query(body, signal)) {
      if (event === "message") text.append(data.text);
      if (event === "final_answer") answer = data;
    }
    fill(text, details, answer);
  } catch (error) {
    answer = null;
    const stopped = error.name === "AbortError";
    element("p", stopped ? "Stopped." : error.message, details, { className: "error", role: "alert" });
  } finally {
    text.ariaBusy = "false";
  }
  return answer;
}

function fill(text, details, answer) {
  const cited = new Map(answer.citations.map((citation) => [citation.index, citation]));
  text.replaceChildren();
  answer.answer.split(MARKER).forEach((part, place) => {
    const citation = place % 2 ? cited.get(Number(part)) : undefined; // the odd parts are numbers
    if (citation) text.append(sourceButton(answer, citation, `[${part}]`, "cite"));
    else text.append(place % 2 ? `[${part}]` : part);
  });
  const { context, timings, usage } = answer;
  for (const { original, replacement, read } of answer.searched_for?.corrections ?? []) {
    element("p", `${read ? "Read" : "Searched for"} “${original}” as “${replacement}”.`, details, { className: "notes" });
  }
  element("h4", "Sources", details);
  const list = element("ul", undefined, details, { className: "sources" });
  for (const citation of answer.citations) {
    const place = placeOf(citation);
    const page = place && `, ${place}`;
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
    if (note) element("p", note, details, { className: "notes" });
  }
}

function sourceButton(answer, citation, label, className) {
  const button = element("button", label, undefined, { type: "button", className });
  button.ariaLabel = `Source ${citation.index}: ${citation.title}`;
  button.addEventListener("click", () => openSource(answer.namespace, citation));
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
    ["queue", rest(of("queue"), "load")], ["load", of("load")], ["compose", of("compose")],
    ["recompute", of("recompute")], ["prefill", rest(of("prefill"), "compose", "recompute")],
  ];
  const known = parts.reduce((sum, [, value]) => sum + value, 0);
  const first = timings.ttft_ms ?? timings.total_ms;
  return [...parts, ["other", Math.max(0, first - known)], ["decode", Math.max(0, timings.total_ms - first)]]
    .map(([name, value], place) => [name, value, `c${place % 10}`]);
}

// A sentence about the same question answered exactly and composed.
export function comparison(exact, composed) {
  if (["prefix", "full"].includes(composed.context.strategy)) {
    return "Both were answered exactly: no composed strategy is verified, measured and faster here.";
  }
  const [a, b] = [exact.timings.ttft_ms ?? exact.timings.total_ms, composed.timings.ttft_ms ?? composed.timings.total_ms];
  const times = a > b ? `${(a / b).toFixed(1)} times sooner` : `${(b / a).toFixed(1)} times later`;
  const computed = (answer) => count(answer.context.tokens_recomputed);
  return `Composed (${composed.context.strategy}): first token ${ms(b)}, ${times} than exact (${ms(a)}); ` +
    `document tokens computed ${computed(composed)} and ${computed(exact)}, kept in KV ` +
    `${count(composed.context.tokens_kept)} and ${count(exact.context.tokens_kept)}.`;
}
