// Answers of a snapshot: a folder of files that `astuner export --format snapshot` wrote. It replaces the server.

// Set by the file data/contents.js of a snapshot; undefined if a server answers.
export const snapshot = globalThis.astunerSnapshot;

const rules = snapshot && globalThis.trustedTypes?.createPolicy("snapshot", {
  createScriptURL: (name) => {
    if (!/^data\/[a-z0-9]+\.js$/.test(name)) throw new Error("not a file of the snapshot");
    return name;
  },
});
const waiting = new Map();

export async function answerFromSnapshot(path, query) {
  if (path === "episodes") return episodes(await part("rows"), query);
  const key = keyOf(path, query);
  const file = snapshot.files[key];
  if (file === undefined) throw new Error(missing());
  return (await part(file))[key];
}

// The same text as `_key` of snapshot.py.
function keyOf(path, query) {
  const pairs = Object.entries(query).flatMap(([name, value]) => [value].flat().map((item) => [name, item]))
    .filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => `${name}=${value}`);
  return [path, ...pairs.sort()].join("\n");
}

function missing() {
  return `This snapshot does not contain this page. It has ${snapshot.included} of ${snapshot.episodes} episodes in full; `
    + "astuner export --format snapshot --episodes all writes all of them.";
}

// The content of a data file, which calls astunerSnapshot.add(name, content). Scripts are what a page may load from files.
function part(name) {
  if (!waiting.has(name)) {
    waiting.set(name, new Promise((resolve, reject) => {
      const script = document.createElement("script");
      snapshot.add = (added, content) => { snapshot.parts[added] = JSON.parse(content); };
      script.src = rules ? rules.createScriptURL(`data/${name}.js`) : `data/${name}.js`;
      script.onload = () => { resolve(snapshot.parts[name]); script.remove(); };
      script.onerror = () => reject(new Error(`the file data/${name}.js of the snapshot is missing`));
      document.head.append(script);
    }));
  }
  return waiting.get(name);
}

const ORDERS = {
  latest: (a, b) => b.id - a.id, step: (a, b) => a.step - b.step || a.id - b.id,
  reward: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || b.id - a.id,
  reward_up: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity) || b.id - a.id,
  tokens: (a, b) => b.tokens_raw - a.tokens_raw || b.id - a.id, forks: (a, b) => b.forks - a.forks || b.id - a.id,
  seconds: (a, b) => b.seconds - a.seconds || b.id - a.id,
};
const full = (run, row) => keyOf("episode", { run, episode: row.key }) in snapshot.files;
const SEARCHED = "A snapshot searches tasks, errors and the beginnings of answers, and not the other messages.";
const TEXTS = ["task", "query", "episode", "error_kind", "error", "answer"];

// A page of the list of episodes, as the server would send it: first the episodes that the snapshot has in full. The search
// covers the texts of the list.
function episodes({ columns, rows }, query) {
  const asked = (name) => (query[name] === undefined || query[name] === "" ? null : String(query[name]));
  const words = asked("text")?.toLowerCase();
  const conditions = [
    ["split", (row, value) => row.split === value], ["step", (row, value) => row.step === Number(value)], ["status", (row, value) => row.status === value],
    ["task", (row, value) => row.task_key === value], ["failure", (row, value) => row.failure === value],
    ["error", (row, value) => (value === "any" ? row.error_kind !== null : row.error_kind === value)],
    ["least", (row, value) => row.reward !== null && row.reward >= Number(value)], ["most", (row, value) => row.reward !== null && row.reward <= Number(value)],
    ...["agent", "tag", "finish", "fork"].map((kind) => [kind, (row, value) => row.labels.some(([of, label]) => of === kind && label === value)]),
  ].filter(([name]) => asked(name) !== null);
  const found = rows.map((values) => Object.fromEntries(columns.map((name, place) => [name, values[place]])))
    .filter((row) => conditions.every(([name, holds]) => holds(row, asked(name))))
    .filter((row) => !words || TEXTS.some((name) => row[name]?.toLowerCase().includes(words)))
    .sort(ORDERS[query.order] ?? ORDERS.latest).sort((a, b) => full(query.run, b) - full(query.run, a));
  const offset = Number(query.offset) || 0;
  const page = { total: found.length, offset, rows: found.slice(offset, offset + (Number(query.limit) || 100)) };
  return words ? { ...page, search: { error: SEARCHED } } : page;
}
