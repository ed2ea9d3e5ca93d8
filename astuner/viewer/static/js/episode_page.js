// The page of an episode: its links, and its content.

import { fetchJson } from "./address.js";
import { episodeContent } from "./episode.js";
import { episodeToolbar } from "./toolbar.js";

export async function episodePage(query) {
  const asked = { run: query.get("run"), episode: query.get("episode") };
  const view = await fetchJson("episode", asked);
  return { content: [episodeToolbar(asked.run, view), ...episodeContent(view, query)] };
}
