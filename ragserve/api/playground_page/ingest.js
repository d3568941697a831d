// Uploads files and follows their jobs.

import { call, get } from "/playground/api.js";
import { byId, element } from "/playground/dom.js";

const POLL_MS = 400;
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export function setUp(namespace, ingested) {
  const drop = byId("drop");
  const files = byId("files");
  files.addEventListener("change", () => add(files.files));
  for (const event of ["dragover", "dragleave", "drop"]) {
    drop.addEventListener(event, (happened) => {
      happened.preventDefault();
      drop.classList.toggle("over", event === "dragover");
      if (event === "drop") add(happened.dataTransfer.files);
    });
  }

  async function add(chosen) {
    if (!chosen.length) return;
    const form = new FormData();
    form.set("namespace", namespace());
    for (const file of chosen) form.append("files", file);
    const box = element("div", undefined, undefined, { className: "job" });
    byId("jobs").prepend(box);
    const line = element("div", `Sending ${chosen.length} files`, box);
    const progress = element("progress", undefined, box, { ariaLabel: "Progress of the ingestion" });
    const list = element("ul", undefined, box);
    files.value = "";
    try {
      let job = await (await call("/rag/ingest", { method: "POST", body: form })).json();
      while (["queued", "running"].includes(job.state)) {
        await pause(POLL_MS);
        job = await get(`/rag/jobs/${encodeURIComponent(job.job_id)}?limit=1000`);
        show(job, line, progress, list);
      }
      await ingested(job.namespace);
    } catch (error) {
      line.textContent = error.message;
      line.className = "error";
      progress.remove();
    }
  }
}

function show(job, line, progress, list) {
  progress.max = job.n_items;
  progress.value = job.n_items - (job.counts.pending ?? 0);
  line.textContent = `${job.namespace}: ${job.state}, ${progress.value} of ${job.n_items} files, ` +
    `${job.chunks} passages${job.error ? `. ${job.error}` : ""}`;
  list.replaceChildren(...job.items.map((item) => element(
    "li",
    `${item.source}: ${item.state}${item.reason ? `. ${item.reason}` : ""}`,
    undefined,
    { className: item.state === "failed" ? "error" : "" },
  )));
}
