// The logs of a run and the tracebacks of its failed episodes.

import { fetchJson, link } from "./address.js";
import { brief, count, h, plural, textBox } from "./dom.js";
import { polled } from "./polling.js";

const TRACEBACKS = "tracebacks";
// Largest number of characters that are shown. Beyond it, a followed log starts again with its latest piece.
const MOST = 1_000_000;

export async function logsPage(query) {
  const run = query.get("run"), text = query.get("text") ?? "";
  const about = await fetchJson("logs", { run });
  const first = about.files[0]?.name ?? TRACEBACKS;
  const file = query.get("file") ?? first;
  const tabs = h("nav", { class: "bar tabs", "aria-label": "logs" },
    about.files.map(({ name, size }) => tab(run, file, name, `${name} (${bytes(size)})`)),
    tab(run, file, TRACEBACKS, `tracebacks (${plural(about.failed, "failed episode")})`));
  const shown = file === TRACEBACKS ? await tracebackList(run) : text ? await searchResult(run, file, text, query.get("before")) : await logFile(run, file, query.get("before"));
  return { content: [h("h1", {}, "Logs"), tabs, ...shown.content], refresh: shown.refresh, leave: shown.leave };
}

function tab(run, current, name, title) {
  return h("a", { class: "pill", href: link("logs", { run, file: name }), "aria-current": name === current ? "page" : null }, brief(title, 80));
}

function searchField(run, file, text) {
  return h("form", { role: "search", class: "bar", onsubmit: (event) => event.preventDefault() },
    h("label", {}, "search in this log", h("input", { type: "search", name: "text", size: 24, value: text,
      onchange: (event) => { location.hash = link("logs", { run, file, text: event.target.value }); } })),
    text ? h("a", { href: link("logs", { run, file }) }, "show the log") : null);
}

// The end of a log, which grows with the file, and its earlier pieces on demand.
async function logFile(run, file, before) {
  const box = h("pre", { class: "card log", tabindex: "0", "aria-label": file });
  let piece = await fetchJson("log", { run, file, before });
  let start = piece.start, end = piece.end, drawn = 0;
  const follows = !before;
  const top = h("p", { class: "soft" });
  const earlier = h("button", { type: "button", id: "earlier", onclick: async () => {
    const height = box.scrollHeight;
    piece = await fetchJson("log", { run, file, before: start });
    start = piece.start;
    box.prepend(textNode(piece.text));
    box.scrollTop += box.scrollHeight - height;
    update();
  } }, "load earlier lines");
  const textNode = (text) => { drawn += text.length; return textBox(text, text.length); };
  const update = () => {
    earlier.hidden = start === 0 || drawn > MOST;
    const part = start === 0 ? "" : `from byte ${count(start)} of ${count(piece.size)}`;
    top.textContent = piece.size === 0 ? "This log is empty." : drawn > MOST && start > 0 ? `${part}; search to find earlier lines` : part;
  };
  box.append(textNode(piece.text));
  update();
  const refresh = async () => {
    if (!follows) return "";
    const added = await fetchJson("log", { run, file, after: end });
    if (added.size < end) { location.reload(); return ""; }
    end = added.end;
    if (added.text) {
      const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
      if (drawn > MOST && isAtEnd) {
        box.replaceChildren();
        [drawn, start] = [0, added.start];
      }
      box.append(textNode(added.text));
      update();
      if (isAtEnd) box.scrollTop = box.scrollHeight;
    }
    return `${bytes(added.size)}, following`;
  };
  requestAnimationFrame(() => { if (follows) box.scrollTop = box.scrollHeight; });
  return { content: [searchField(run, file, ""), top, earlier, box], refresh };
}

async function searchResult(run, file, text, before) {
  const found = await fetchJson("log_search", { run, file, text, before });
  const lines = found.matches.map(({ start, line }) => h("li", {},
    h("a", { class: "soft", href: link("logs", { run, file, before: start + line.length + 2000 }) }, `byte ${count(start)}`), " ", marked(line, text)));
  const more = found.searched > 0 ? h("a", { href: link("logs", { run, file, text, before: found.searched }) }, `search the earlier ${bytes(found.searched)}`) : "the whole log was searched";
  return { content: [searchField(run, file, text),
    h("p", { class: "soft", role: "status" }, `${plural(found.matches.length, "line")}, the latest first; `, more),
    h("ol", { class: "card log matches" }, lines)] };
}

function marked(line, text) {
  const at = line.toLowerCase().indexOf(text.toLowerCase());
  if (at < 0) return brief(line, 2000);
  const end = at + text.length;
  return [brief(line.slice(0, at), 2000), h("mark", {}, brief(line.slice(at, end), 2000)), brief(line.slice(end), 2000)];
}

async function tracebackList(run) {
  const { box, refresh } = await polled(() => fetchJson("tracebacks", { run }), (groups) => (groups.length
    ? groups.map((group) => h("section", { class: "card traceback" },
      h("h2", { class: "bad" }, `${count(group.episodes)}× ${brief(group.error || group.kind || "no message", 300)}`),
      h("p", {}, h("a", { href: link("episodes", { run, failure: group.key }) }, plural(group.episodes, "episode")), " · ",
        h("a", { href: link("episode", { run, episode: group.episode }) }, "latest episode")),
      group.traceback ? h("pre", {}, textBox(group.traceback, 20_000)) : h("p", { class: "soft" }, "This episode has no traceback.")))
    : [h("p", { class: "card soft" }, "No episode has failed.")]));
  return { content: [box], refresh: async () => { await refresh(); } };
}

function bytes(size) {
  if (size < 1024) return `${size} B`;
  return size < 2 ** 20 ? `${count(size / 1024)} KiB` : `${count(size / 2 ** 20)} MiB`;
}
