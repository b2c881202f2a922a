"""The browser of the tests finds what a reader of a page would complain about."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.support.browser import look_at, look_everywhere

pytestmark = pytest.mark.integration

GOOD = """<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>a</title><style>:root { color-scheme: light dark; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #eee; } }</style><body>%s</body></html>"""


def write(folder: Path, body: str) -> Path:
    page = folder / "page.html"
    page.write_text(GOOD % body)
    return page


def test_browser_has_no_complaint_about_good_page(browser: Browser, tmp_path: Path) -> None:
    looks = look_everywhere(browser, write(tmp_path, "<h1>Some words</h1><p>and more of them</p>"), tmp_path)
    assert [complaint for look in looks for complaint in look.complaints] == []
    sizes = {look.screenshot.name: look.screenshot.stat().st_size for look in looks}
    assert sorted(sizes) == ["page-1280-dark.png", "page-1280-light.png", "page-390-dark.png", "page-390-light.png"]
    assert all(sizes.values())


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("<div style='width: 600px'>wide text</div>", "overflow"),
        ("<img src='http://127.0.0.1:1/a.png'>", "errors"),
        ("<script>throw new Error('no')</script>", "errors"),
        ("<p style='color: #999; background: #fff'>pale text</p>", "contrast"),
        ("<p style='width: 30px; overflow-wrap: anywhere'>mississippi</p>", "broken"),
        ("<p style='width: 30px; overflow: hidden'>mississippi</p>", "clipped"),
    ],
)
def test_browser_reports_each_kind_of_fault(body: str, kind: str, browser: Browser, tmp_path: Path) -> None:
    look = look_at(browser, write(tmp_path, body), tmp_path, width=390)
    found = {name for name in ("overflow", "errors", "contrast", "broken", "clipped") if getattr(look, name)}
    assert found == {kind}
    assert look.complaints


def test_browser_allows_breaks_of_paths_and_of_very_long_names(browser: Browser, tmp_path: Path) -> None:
    body = f"<p style='width: 200px; overflow-wrap: anywhere'>/var/lib/store/data and {'x' * 120}</p>"
    assert look_at(browser, write(tmp_path, body), tmp_path, width=390).complaints == []
