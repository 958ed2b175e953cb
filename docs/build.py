"""Build the documentation: Markdown in, plain HTML out, which opens from file:// and asks nothing of any network.

    python docs/build.py [OUT]      # build/docs, what `make docs` does

The build fails, and names every reason, where a link or an anchor leads nowhere, a page is not listed in nav.toml, a code does not exist, or a
page holds raw HTML.
"""

from __future__ import annotations

import fnmatch
import json
import posixpath
import re
import shutil
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from codes import generated, known
from jinja2 import Environment, FileSystemLoader
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
_CODE = re.compile(r"\b(W[NL]\d{3})\b")


class BuildError(Exception):
    """What is wrong, one line each."""


@dataclass(slots=True)
class Page:
    """One page: its source, and what rendering it found."""

    path: str  # below docs/, with /
    text: str
    tokens: list[Token] = field(default_factory=list)
    anchors: dict[str, str] = field(default_factory=dict)  # heading by anchor

    @property
    def url(self) -> str:
        """Where it lies in the site."""
        return self.path.removesuffix(".md") + ".html"

    @property
    def title(self) -> str:
        """The first heading, without backticks."""
        return next(iter(self.anchors.values()), self.path)


@dataclass(slots=True)
class Site:
    """All pages, the files they show, and what was wrong."""

    pages: dict[str, Page]
    wrong: list[str] = field(default_factory=list)
    files: dict[str, Path] = field(default_factory=dict)  # by place in the site


def _highlighted(code: str, language: str, _attributes: str) -> str:
    try:
        lexer = get_lexer_by_name(language or "text", stripnl=False)
    except ClassNotFound:
        lexer = get_lexer_by_name("text")
    return f'<pre tabindex="0"><code>{highlight(code, lexer, HtmlFormatter(nowrap=True))}</code></pre>'


class Renderer(RendererHTML):
    """HTML in which a table can be scrolled, by keyboard too: it may be wider than a phone."""

    def table_open(self, *_: object) -> str:
        """Put a box around a table."""
        return '<div class="table" tabindex="0" role="group" aria-label="Table"><table>\n'

    def table_close(self, *_: object) -> str:
        """End the box."""
        return "</table></div>\n"


MARKDOWN = MarkdownIt("commonmark", {"highlight": _highlighted, "typographer": False}).enable("table")


def main(argv: list[str]) -> int:
    """Build, or say what is wrong."""
    out = Path(argv[0]) if argv else ROOT / "build" / "docs"
    try:
        site = build(out)
    except BuildError as error:
        print(f"docs: not built\n{error}", file=sys.stderr)
        return 1
    print(f"docs: {len(site.pages)} pages in {out}; open {out / 'index.html'}")
    return 0


def build(out: Path, docs: Path = DOCS) -> Site:
    """Read, check and write the site. Cost: seconds; lint reads one snippet per code."""
    written = {p.relative_to(docs).as_posix(): p.read_text(encoding="utf-8") for p in sorted(docs.rglob("*.md"))}
    site = Site({path: parsed(path, text) for path, text in {**written, **generated(written)}.items()})
    sections = listed(site, tomllib.loads((docs / "nav.toml").read_text(encoding="utf-8"))["section"])
    for page in site.pages.values():
        _resolve(site, page, docs)
    _check_readme(site)
    if site.wrong:
        raise BuildError("\n".join(site.wrong))
    _write(site, sections, out)
    return site


def parsed(path: str, text: str) -> Page:
    """Parse a page and give its headings anchors, spelled as GitHub spells them."""
    page = Page(path, text, MARKDOWN.parse(text))
    for opening, inline in zip(page.tokens, page.tokens[1:], strict=False):
        if opening.type == "heading_open":
            heading = _plain(inline)
            opening.attrSet("id", _anchor(heading, page.anchors))
    return page


def _anchor(heading: str, taken: dict[str, str]) -> str:
    base = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    name = next(n for n in [base, *(f"{base}-{k}" for k in range(1, 99))] if n not in taken)
    taken[name] = heading
    return name


def _plain(inline: Token) -> str:
    return "".join(" " if t.type == "softbreak" else t.content for t in inline.children or [] if t.type in ("text", "code_inline", "softbreak"))


def listed(site: Site, sections: list[dict[str, object]]) -> list[tuple[str, list[Page]]]:
    """Return the pages of each section, in the order of nav.toml; a page that is nowhere, or twice, is wrong."""
    found: list[tuple[str, list[Page]]] = []
    seen: set[str] = set()
    for section in sections:
        here: list[str] = []
        for pattern in section["pages"]:  # type: ignore[attr-defined]
            here += [p for p in sorted(fnmatch.filter(site.pages, pattern)) if p not in here]
        site.wrong += [f"docs/{p}: listed twice in docs/nav.toml" for p in here if p in seen]
        seen.update(here)
        found.append((str(section["title"]), [site.pages[p] for p in here]))
    site.wrong += [f"docs/{p}: not listed in docs/nav.toml: add it to the section where a reader would look for it" for p in site.pages if p not in seen]
    return [(title, pages) for title, pages in found if pages]


def _resolve(site: Site, page: Page, docs: Path) -> None:
    """Turn links to pages into links to HTML, and names of codes into links; note what leads nowhere."""
    for token in page.tokens:
        if token.type == "html_block" and not token.content.lstrip().startswith("<!--"):
            site.wrong.append(f"docs/{page.path}: raw HTML: {token.content.strip()[:60]}")
        if token.type != "inline":
            continue
        token.children = _with_code_links(site, page, token.children or [])
        for child in token.children:
            name = {"link_open": "href", "image": "src"}.get(child.type)
            if name:
                child.attrSet(name, _target(site, page, str(child.attrGet(name)), docs))
            elif child.type == "html_inline" and not child.content.startswith("<!--"):
                site.wrong.append(f"docs/{page.path}: raw HTML: {child.content[:60]}")


def _target(site: Site, page: Page, link: str, docs: Path) -> str:
    if re.match(r"[a-z]+:", link):
        return link
    path, _, anchor = link.partition("#")
    place = posixpath.normpath(posixpath.join(posixpath.dirname(page.path), path)) if path else page.path
    if place in site.pages:
        if anchor and anchor not in site.pages[place].anchors:
            site.wrong.append(f"docs/{page.path}: {link}: no such heading in docs/{place}")
        return _from(page, site.pages[place].url) + (f"#{anchor}" if anchor else "")
    if (docs / place).is_file():
        inside = posixpath.join("files", posixpath.relpath(posixpath.normpath(posixpath.join("docs", place))))
        site.files[inside] = docs / place
        return _from(page, inside)
    site.wrong.append(f"docs/{page.path}: {link}: no such page")
    return link


def _from(page: Page, url: str) -> str:
    return posixpath.relpath(url, posixpath.dirname(page.url) or ".")


def _with_code_links(site: Site, page: Page, children: list[Token]) -> list[Token]:
    """Make a link of each code in running text that is not one already."""
    out: list[Token] = []
    depth = 0
    for child in children:
        depth += {"link_open": 1, "link_close": -1}.get(child.type, 0)
        if child.type != "text" or depth or page.path.startswith("codes/index"):
            out.append(child)
            continue
        for n, piece in enumerate(_CODE.split(child.content)):
            if n % 2 == 0:
                out.append(Token("text", "", 0, content=piece))
            elif page.path == f"codes/{piece}.md" or piece not in known():
                if piece not in known():
                    site.wrong.append(f"docs/{page.path}: there is no code {piece}")
                out.append(Token("text", "", 0, content=piece))
            else:
                href = posixpath.relpath(f"codes/{piece}.md", posixpath.dirname(page.path) or ".")
                out += [Token("link_open", "a", 1, attrs={"href": href}), Token("text", "", 0, content=piece), Token("link_close", "a", -1)]
    return out


def _check_readme(site: Site) -> None:
    """Check what the README links to: pages, their anchors, and files."""
    for link in re.findall(r"\]\(([^)#:]*(?:#[^)]*)?)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        page = site.pages.get(path.removeprefix("docs/"))
        if path and not (ROOT / path).exists():
            site.wrong.append(f"README.md: {link}: no such file")
        elif page and anchor and anchor not in page.anchors:
            site.wrong.append(f"README.md: {link}: no such heading")


def _write(site: Site, sections: list[tuple[str, list[Page]]], out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    template = Environment(loader=FileSystemLoader(DOCS / "site"), autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template("page.html")
    order = [page for _, pages in sections for page in pages]
    for number, page in enumerate(order):
        body = Renderer().render(page.tokens, MARKDOWN.options, {})
        place = out / page.url
        place.parent.mkdir(parents=True, exist_ok=True)
        beside = {"before": order[number - 1] if number else None, "after": order[number + 1] if number + 1 < len(order) else None}
        html = template.render(
            page=page, body=re.sub(r"<!--.*?-->\n?", "", body, flags=re.DOTALL), sections=sections, link=lambda url, p=page: _from(p, url), **beside
        )
        place.write_text(html, encoding="utf-8")
    for inside, source in site.files.items():
        (out / inside).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, out / inside)
    shutil.copyfile(DOCS / "site" / "site.js", out / "site.js")
    (out / "site.css").write_text((DOCS / "site" / "site.css").read_text(encoding="utf-8") + _code_colours(), encoding="utf-8")
    entries = [entry for page in order for entry in _search_entries(page)]
    (out / "index.js").write_text(f"const INDEX = {json.dumps(entries, ensure_ascii=False)};\n", encoding="utf-8")


def _code_colours() -> str:
    light, dark = HtmlFormatter(style="default"), HtmlFormatter(style="github-dark")
    return light.get_style_defs("pre") + "\n" + dark.get_style_defs('[data-theme="dark"] pre') + "\n"


def _search_entries(page: Page) -> list[list[str]]:
    """Return [title, heading, url, text] for each heading of a page."""
    entries: list[list[str]] = []
    opened = False
    for token in page.tokens:
        if token.type == "heading_open":
            anchor = str(token.attrGet("id"))
            entries.append([page.title, page.anchors[anchor], f"{page.url}#{anchor}", ""])
            opened = True
        elif token.type == "inline" and entries and not opened:
            entries[-1][3] += _plain(token) + " "
        elif token.type == "fence" and entries:
            entries[-1][3] += token.content[:400] + " "
        elif token.type == "heading_close":
            opened = False
    return entries


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
