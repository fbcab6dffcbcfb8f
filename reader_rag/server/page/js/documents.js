// The list of documents: upload with progress, what was skipped and why, delete with undo.

import { call, callJson, serverEvents, upload } from "./api.js";
import { announce, bytes, counted, el, h, sentence, showError, toast } from "./dom.js";
import { placeHash } from "./text.js";

const PAGE = 100; // documents asked for at once
const UNDO_S = 20; // how long the button to undo is shown at most
const FORM_BYTES = 1000; // at most, around a file in the body of a request

export class Documents {
  /**
   * @param {{limits: () => Object, onchange: (count: number) => void}} host
   */
  constructor(host) {
    this.host = host;
    this.known = [];
    this.more = false;
    this.total = 0;
    this.uploads = h("div", { "aria-live": "polite" });
    this.list = h("ul", { class: "document-list", "aria-label": "Documents" });
    this.empty = h("p", { class: "quiet document-list", hidden: true, text: "No documents yet." });
    this.further = h("button", { type: "button", class: "button more", text: "Show more", hidden: true, onclick: () => this.load(true) });
    el("documents").append(
      h("div", { class: "documents-inner" }, this.dropzone("Add documents"), this.uploads, this.empty, this.list, this.further),
    );
  }

  /** A place to drop files on, with a button that chooses them. */
  dropzone(label) {
    const input = h("input", { type: "file", multiple: true, hidden: true });
    input.addEventListener("change", () => {
      this.add([...input.files]);
      input.value = "";
    });
    const { file_bytes: limit } = this.host.limits();
    return h(
      "div",
      { class: "dropzone" },
      h("p", {}, h("strong", { text: "Drop files here" }), `PDF, Word, Markdown, HTML, plain text and more${limit ? `, up to ${bytes(limit)} each` : ""}. They stay on this server.`),
      input,
      h("button", { type: "button", class: "button primary", text: label, onclick: () => input.click() }),
    );
  }

  /** Loads the list, or its next part. */
  async load(next = false) {
    const after = next ? this.known.at(-1)?.id : null;
    const query = new URLSearchParams({ limit: String(PAGE), ...(after ? { after } : {}) });
    try {
      const found = await callJson(`api/documents?${query}`);
      this.known = next ? [...this.known, ...found.documents] : found.documents;
      this.more = found.next !== null;
      this.total = found.total;
    } catch (error) {
      showError(error);
    }
    this.draw();
  }

  draw() {
    this.empty.hidden = this.known.length > 0;
    this.further.hidden = !this.more;
    this.list.replaceChildren(
      ...this.known.map((one) =>
        h(
          "li",
          { class: "document-row" },
          h("a", { class: "document-name", href: placeHash({ document: one.id, version: one.version }), text: one.name }),
          h("span", { class: "meta", text: meta(one) }),
          h("button", { type: "button", class: "text", text: "Delete", "aria-label": `Delete ${one.name}`, onclick: () => this.remove(one) }),
        ),
      ),
    );
    this.host.onchange(this.total);
  }

  async remove(one) {
    const name = one.name;
    try {
      const { undo } = await callJson(`api/documents/${encodeURIComponent(one.id)}`, { method: "DELETE" });
      this.known = this.known.filter((other) => other.id !== one.id);
      this.total -= 1;
      this.draw();
      toast(`Deleted “${name}”.`, { action: "Undo", seconds: Math.min(UNDO_S, this.host.limits().undo_seconds), onaction: () => this.restore(undo, name) });
    } catch (error) {
      showError(error);
    }
  }

  async restore(undo, name) {
    try {
      await call("api/documents/undo", { method: "POST", json: { undo } });
      announce(`“${name}” is back.`);
      await this.load();
    } catch (error) {
      showError(error);
    }
  }

  /** Uploads files, and shows how far their ingestion is. */
  async add(files) {
    if (!files.length) return;
    const limits = this.host.limits();
    const most = Math.min(limits.file_bytes, limits.upload_bytes - FORM_BYTES);
    const large = files.filter((file) => file.size > most).map((file) => ({ name: file.name, reason: `larger than ${bytes(most)}` }));
    const right = files.filter((file) => file.size <= most);
    const box = new UploadBox(this.uploads);
    const skipped = [...large];
    const added = [];
    try {
      for (const some of batches(right, limits.files_per_request, limits.upload_bytes)) {
        const { job } = await upload("api/documents", some, (sent, total) => box.progress(`Uploading ${counted(some.length, "file")}`, sent, total));
        const state = await this.follow(job, box);
        skipped.push(...(state.skipped ?? []));
        added.push(...(state.added ?? []));
        if (state.state === "failed") throw new Error(state.error || "The documents could not be read");
      }
      box.done(added.length, skipped);
    } catch (error) {
      box.failed(error, skipped);
    }
    await this.load();
  }

  async follow(job, box) {
    let last = {};
    const response = await call(`api/jobs/${encodeURIComponent(job)}/events`);
    for await (const { data } of serverEvents(response)) {
      last = JSON.parse(data);
      box.progress(last.current ? `Reading ${last.current}` : "Reading the files", last.done, last.total);
    }
    return last;
  }
}

/** Files in the order given, in requests of as many files and bytes as the server takes. */
export function batches(files, count, most) {
  const all = [];
  let size = Infinity;
  for (const file of files) {
    const needed = file.size + FORM_BYTES;
    if (size + needed > most || all.at(-1).length >= count) {
      all.push([]);
      size = 0;
    }
    all.at(-1).push(file);
    size += needed;
  }
  return all;
}

function meta(one) {
  const parts = [];
  if (one.pages > 1 || one.type === "pdf") parts.push(counted(one.pages, "page"));
  if (one.size) parts.push(bytes(one.size));
  return parts.join(" · ");
}

/** One upload on the page. */
class UploadBox {
  constructor(parent) {
    this.text = h("p", { text: "Preparing" });
    this.bar = h("progress", { max: "1", "aria-label": "Progress of the upload" });
    this.close = h("button", { type: "button", class: "icon", "aria-label": "Close", text: "✕", hidden: true, onclick: () => this.node.remove() });
    this.node = h("div", { class: "upload" }, h("div", { class: "upload-line" }, this.text, this.close), this.bar);
    parent.prepend(this.node);
  }

  progress(text, done, total) {
    if (this.text.textContent !== text) this.text.textContent = text;
    if (total > 0) this.bar.value = done / total;
    else this.bar.removeAttribute("value");
  }

  done(added, skipped) {
    const text = added ? `Added ${counted(added, "document")}.` : "Nothing new was added.";
    this.end(skipped.length ? `${text} ${counted(skipped.length, "file")} skipped.` : text, skipped);
    if (!skipped.length) setTimeout(() => this.node.remove(), 8000);
  }

  failed(error, skipped) {
    this.text.classList.add("error");
    this.end(sentence(error), skipped);
  }

  end(text, skipped) {
    this.text.textContent = text;
    this.bar.remove();
    this.close.hidden = false;
    announce(text);
    if (!skipped.length) return;
    this.node.append(
      h(
        "div",
        { class: "skipped" },
        h("h3", { text: "Skipped" }),
        h("ul", {}, ...skipped.map(({ name, reason }) => h("li", {}, h("span", { class: "name", text: name }), h("span", { class: "reason", text: ` — ${reason}` })))),
      ),
    );
  }
}

/** Lets files be dropped anywhere on the window. */
export function acceptDrops(onfiles) {
  const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  let depth = 0;
  const show = (on) => {
    el("drop-hint").hidden = !on;
  };
  addEventListener("dragenter", (event) => hasFiles(event) && (event.preventDefault(), (depth += 1), show(true)));
  addEventListener("dragleave", (event) => hasFiles(event) && ((depth = Math.max(0, depth - 1)), show(depth > 0)));
  addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
  addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    depth = 0;
    show(false);
    onfiles([...event.dataTransfer.files]);
  });
}
