"""Pages in headless Chromium: screenshots, and what a reader would complain about."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")
READY_MS = 60_000
WORD_MAX = 24
"""Letters and digits of a word that must stay on one line; a longer name may have to break."""

BROKEN_WORDS = """longest => {
    const found = [];
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node = texts.nextNode(); node; node = texts.nextNode()) {
        if (!node.parentElement.checkVisibility()) continue;
        for (const word of node.data.matchAll(/[\\p{Script=Latin}\\p{Script=Greek}\\p{Script=Cyrillic}\\p{N}_]+/gu)) {
            if (word[0].length < 2 || word[0].length > longest) continue;
            const range = document.createRange();
            range.setStart(node, word.index);
            range.setEnd(node, word.index + word[0].length);
            const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
            if (lines.size > 1) found.push(word[0]);
        }
    }
    return found;
}"""
CLIPPED = """() => [...document.body.querySelectorAll("*")]
    .filter(one => one.checkVisibility() && one.clientWidth && getComputedStyle(one).overflowX !== "visible"
        && one.scrollWidth > one.clientWidth + 1)
    .map(one => `${one.tagName} ${one.className}: ${one.textContent.trim().slice(0, 60)}`)"""
OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
UNDECIDED = ("shortTextContent", "nonBmp")
"""Reasons for which axe does not judge a text: single signs."""


@dataclass(frozen=True)
class Look:
    """A page as it appears.

    Attributes:
        screenshot: the full page.
        overflow: pixels by which the page is wider than the window.
        errors: errors on the console, exceptions, and requests: a page needs no other file.
        contrast: elements with less contrast than WCAG AA requires, or with one that cannot be decided.
        broken: words that are broken in the middle.
        clipped: elements whose text continues outside their box.
    """

    screenshot: Path
    overflow: int
    errors: tuple[str, ...]
    contrast: tuple[str, ...]
    broken: tuple[str, ...]
    clipped: tuple[str, ...]

    @property
    def complaints(self) -> list[str]:
        """Everything that is wrong, one line each; empty for a good page."""
        where = self.screenshot.stem
        wide = [f"{where}: {self.overflow} px too wide"] if self.overflow > 0 else []
        named = {"error": self.errors, "contrast": self.contrast, "broken word": self.broken, "clipped": self.clipped}
        return [*wide, *(f"{where}: {kind}: {one}" for kind, found in named.items() for one in found)]


def chromium() -> str:
    """Return the browser's path; skip the test if there is none."""
    found = next(filter(None, map(shutil.which, (os.environ.get("CHROMIUM", ""), *NAMES))), None)
    return found or pytest.skip("needs Chromium: sudo apt-get install chromium, or set CHROMIUM to its path")


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start a browser, which takes a second. A thread with one cannot run coroutines (asyncio.run) meanwhile."""
    path = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


def look_at(
    browser: Browser,
    page: Path | str,
    screenshots: Path,
    *,
    width: int = 1280,
    scheme: Any = "light",
    name: str = "",
    ready: str = "",
) -> Look:
    """Open a page in a window of this width and color scheme, and take a screenshot of all of it.

    Args:
        browser: from ``open_browser``.
        page: an HTML file, or the address of a page, which may ask its own port only.
        screenshots: directory for the screenshot ``PAGE-WIDTH-SCHEME.png``; created if missing.
        width: of the window, in pixels.
        scheme: ``light`` or ``dark``.
        name: of the page [default: that of the file].
        ready: selector of an element that a page shows once it is complete.
    """
    screenshots.mkdir(parents=True, exist_ok=True)
    is_file = isinstance(page, Path)
    stem = name or (page.stem if isinstance(page, Path) else "page")
    screenshot = screenshots / f"{stem}-{width}-{scheme}.png"
    errors: list[str] = []
    own = page.resolve().as_uri() if isinstance(page, Path) else page
    with browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=is_file) as context:
        tab = context.new_page()
        tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("request", lambda one: errors.append(f"request of {one.url}") if not allowed(one.url, own) else None)
        tab.goto(own)
        if ready:
            tab.locator(ready).first.wait_for(timeout=READY_MS)
        tab.screenshot(path=screenshot, full_page=True)
        overflow = tab.evaluate(OVERFLOW)
        broken, clipped = tab.evaluate(BROKEN_WORDS, WORD_MAX), tab.evaluate(CLIPPED)
        contrast = contrast_faults(Axe().run(tab, options={"runOnly": ["color-contrast"]}).response)
    return Look(screenshot, overflow, tuple(errors), tuple(contrast), tuple(broken), tuple(clipped))


def allowed(url: str, own: str) -> bool:
    """Whether a page may ask for this: a file for itself only, a page of a port for everything of that port."""
    return url == own or (own.startswith("http") and url.startswith(own))


def look_everywhere(browser: Browser, page: Path, screenshots: Path) -> list[Look]:
    """Open an HTML file at both widths in both color schemes."""
    return [look_at(browser, page, screenshots, width=width, scheme=scheme) for width in WIDTHS for scheme in SCHEMES]


def contrast_faults(response: dict[str, Any]) -> Iterator[str]:
    """Yield the elements that axe reports, and those that it could not decide."""
    for rule in (*response["violations"], *response["incomplete"]):
        for node in rule["nodes"]:
            for check in node["any"]:
                if (check["data"] or {}).get("messageKey") not in UNDECIDED:
                    yield f"{node['html'][:100]}: {check['message']}"
