"use strict";
document.querySelector("nav [aria-current]").scrollIntoView({ block: "nearest" });
const root = document.body.dataset.root;
const field = document.getElementById("search");
const list = document.getElementById("found");

document.getElementById("theme").addEventListener("click", () => {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try { localStorage.setItem("theme", next); } catch (error) { /* file:// may refuse it */ }
});

document.getElementById("menu").addEventListener("click", (event) => {
  const open = document.getElementById("nav").classList.toggle("open");
  event.currentTarget.setAttribute("aria-expanded", String(open));
});

// A hit in a title counts more than one in a heading, and that more than one in the text; all words must be there.
function score(entry, words) {
  const [title, heading, , text] = entry.map((part) => part.toLowerCase());
  let sum = 0;
  for (const word of words) {
    const worth = (title.includes(word) ? 6 : 0) + (heading.includes(word) ? 4 : 0) + (text.includes(word) ? 1 : 0);
    if (!worth) return 0;
    sum += worth;
  }
  return sum;
}

function search() {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  const hits = words.length ? INDEX.map((entry) => [score(entry, words), entry]).filter(([points]) => points) : [];
  hits.sort((a, b) => b[0] - a[0]);
  list.replaceChildren(...hits.slice(0, 20).map(([, [title, heading, url, text]]) => {
    const item = document.createElement("li");
    const link = document.createElement("a");
    const where = document.createElement("small");
    link.href = `${root}/${url}`;
    link.textContent = heading === title ? title : `${title}: ${heading}`;
    const at = Math.max(0, text.toLowerCase().indexOf(words[0]) - 30);
    where.textContent = text.slice(at, at + 120);
    link.append(where);
    item.append(link);
    return item;
  }));
  if (words.length && !hits.length) list.textContent = "Nothing found.";
  list.hidden = !words.length;
}

field.addEventListener("input", search);
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== field) { event.preventDefault(); field.focus(); }
  if (event.key === "Escape") { field.value = ""; search(); }
});
document.addEventListener("click", (event) => { if (!event.target.closest(".search")) list.hidden = true; });
