// Draws the page of the address and refreshes it while it is visible.

import { currentAddress, link } from "./address.js";
import { brief, h } from "./dom.js";
import { installKeys } from "./keys.js";
import { errorCard, showLoading } from "./loading.js";
import { snapshot } from "./snapshot.js";

// The modules of a page are loaded when it is first opened, so that lists do not wait for the chart library.
const PAGES = {
  runs: async () => (await import("./runs.js")).runsPage,
  run: async () => (await import("./run.js")).runPage,
  episodes: async () => (await import("./episodes.js")).episodesPage,
  step: async () => (await import("./group.js")).stepPage,
  group: async () => (await import("./group.js")).groupPage,
  logs: async () => (await import("./logs.js")).logsPage,
  rescore: async () => (await import("./rescore.js")).rescorePage,
  episode: async () => (await import("./episode_page.js")).episodePage,
  compare: async () => (await import("./compare.js")).comparePage,
  task: async () => (await import("./task.js")).taskPage,
};
const SECONDS = 2;
const main = document.getElementById("main");
const live = document.getElementById("live");
let current = null;
let drawing = 0;
let loaded = () => {};

async function draw() {
  const id = ++drawing;
  const { page, query } = currentAddress();
  loaded();
  loaded = showLoading(main, live);
  try {
    const make = await (PAGES[page] ?? PAGES.runs)();
    const drawn = await make(query);
    if (id !== drawing) {
      drawn.leave?.();
      return;
    }
    loaded();
    current?.leave?.();
    current = drawn;
    main.replaceChildren(...drawn.content);
  } catch (error) {
    if (id !== drawing) return;
    loaded();
    current?.leave?.();
    current = null;
    main.replaceChildren(errorCard(error, draw));
  }
  crumbs(page, query);
  main.dataset.page = page;
}

function crumbs(page, query) {
  const run = query.getAll("run");
  const parts = [];
  if (run.length) parts.push(h("a", { href: link("run", { run }) }, brief(run.join(" · "), 60)));
  if (["episodes", "group", "episode", "step", "compare", "task"].includes(page)) {
    parts.push(h("a", { href: link("episodes", { run: run[0] }) }, "episodes"));
  }
  if (query.get("step") && page !== "episodes") {
    const step = query.get("step");
    parts.push(h("a", { href: link("step", { run: run[0], step, split: query.get("split") }) }, `step ${brief(step, 9)}`));
  }
  document.getElementById("crumbs").replaceChildren(...parts.flatMap((part) => [" / ", part]));
  document.title = run.length ? `${brief(run[0], 40)} – astuner` : "astuner";
}

async function follow() {
  const shown = current;
  if (!document.hidden && shown?.refresh && !main.hasAttribute("aria-busy")) {
    let text;
    try {
      text = (await shown.refresh()) ?? "";
      live.className = "";
    } catch (error) {
      text = error.message;
      live.className = "bad";
    }
    if (shown === current && !main.hasAttribute("aria-busy")) live.textContent = text;
  }
  setTimeout(follow, SECONDS * 1000);
}

function theme(name) {
  document.documentElement.dataset.theme = name;
}

const dark = matchMedia("(prefers-color-scheme: dark)");
theme(localStorage.getItem("theme") ?? (dark.matches ? "dark" : "light"));
dark.addEventListener("change", () => {
  if (!localStorage.getItem("theme")) { theme(dark.matches ? "dark" : "light"); draw(); }
});
document.getElementById("theme").addEventListener("click", () => {
  const other = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("theme", other);
  theme(other);
  draw();
});
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
installKeys(main, document.getElementById("keys"));
addEventListener("hashchange", () => { scrollTo(0, 0); draw(); });
draw();
// A snapshot does not change.
if (!snapshot) follow();
