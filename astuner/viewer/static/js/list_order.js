// The order of the episodes in the list from which an episode was opened.

const NAME = "episodes of the last list", MOST = 500;

export const EPISODE_LINKS = "a[href^='#/episode?']";

// Remember the episodes of the page, in order, when one of them is opened.
export function rememberList(main) {
  const links = [...new Set([...main.querySelectorAll(EPISODE_LINKS)].map((link) => link.getAttribute("href")))];
  sessionStorage.setItem(NAME, JSON.stringify({ list: location.hash, links: links.slice(0, MOST) }));
}

// Addresses of the list, and of the previous and the next episode in it; null if the episode is not in the last list.
export function placeInList(run, episode) {
  const { list, links } = JSON.parse(sessionStorage.getItem(NAME) ?? '{"links": []}');
  const at = links.findIndex((href) => {
    const query = new URLSearchParams(href.split("?")[1]);
    return query.get("run") === run && query.get("episode") === episode;
  });
  return at < 0 ? null : { list, previous: links[at - 1] ?? null, next: links[at + 1] ?? null, at: at + 1, of: links.length };
}
