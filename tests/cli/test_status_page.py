"""The status page in a browser: complete and readable on phone and desktop, live, and safe against foreign text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from dledger_core import Client, LocalCluster
from dledger_core.control import TransactionId
from dledger_core.rocketmq import encode_messages
from tests.support.browser import SCHEMES, WIDTHS, look_at
from tests.support.http import fetch
from tests.support.soon import soon

pytestmark = pytest.mark.integration

EVIL = "<img src=x onerror=taken=1> <script> taken=1 </script>"
READY = "body[data-state=ready] .message"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(3, groups=("orders", "payments"), http=True) as nodes:
        with Client(nodes.peers, "orders") as client:
            bodies = [b'{"order": %d}' % number for number in range(40)]
            keys = [f"order-{number}" for number in range(40)]
            client.append(encode_messages("orders", 0, bodies, tags="web", keys=keys))
            client.append([EVIL.encode(), b"\x00\xff bytes"])
            client.append(encode_messages([EVIL], 0, [EVIL.encode()], tags=[EVIL], keys=[EVIL]))
            client.pin(EVIL, 0, 3600)
            client.append_attempt([b"open"], transaction=TransactionId(EVIL, 0, EVIL), attempt="a")
            client.commit_transaction(TransactionId("revenue", 0, "run"), [])
        yield nodes


@pytest.fixture
def page(browser: Browser, cluster: LocalCluster) -> Iterator[Page]:
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        tab = context.new_page()
        tab.goto(cluster.page("n0"))
        tab.locator(READY).first.wait_for(timeout=60_000)
        yield tab


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_healthy_page_has_no_complaint(
    width: int, scheme: str, browser: Browser, cluster: LocalCluster, tmp_path: Path
) -> None:
    found = look_at(browser, cluster.page("n0"), tmp_path, width=width, scheme=scheme, name="healthy", ready=READY)
    assert found.complaints == []


def test_page_shows_verdict_groups_and_nodes(page: Page) -> None:
    expect(page.get_by_role("heading", level=1)).to_have_text("Healthy", timeout=60_000)
    for name in ("orders", "payments"):
        card = page.locator("details.group").filter(has=page.locator(".name", has_text=name))
        expect(card.locator("tbody tr")).to_have_count(3)
        expect(card.locator(".badge.leader")).to_have_count(1)


def test_each_page_shows_how_long_commits_take_on_the_leader(browser: Browser, cluster: LocalCluster) -> None:
    def is_known(node: str) -> bool:
        with Client(cluster.peers, "payments") as client:
            client.append([b"paid"])
        port = int(cluster.page(node).rsplit(":", 1)[1].strip("/"))
        return fetch(port, "/api/status").json["history"]["commit_p99_ms"][-3:] != [None] * 3

    for node in cluster.node_ids:
        soon(lambda node=node: is_known(node))
    with browser.new_context() as context:
        tab = context.new_page()
        for node in cluster.node_ids:
            tab.goto(cluster.page(node))
            tile = tab.locator(".tile").filter(has_text="Append until commit")
            expect(tile.locator(".value")).to_have_text(re.compile(r"[0-9.]+m?s"), timeout=60_000)


def test_page_shows_the_disk_of_each_node_as_far_as_it_is_reported(page: Page) -> None:
    disks = page.locator("details.group").first.locator(".disks .disk")
    expect(disks).to_have_text([re.compile(rf"^{name}.*free of") for name in ("n0", "n1", "n2")])

    def as_of_older_nodes(route: Route) -> None:
        report = route.fetch().json()
        for node in report["groups"][0]["nodes"][1:]:
            node |= {"disk_free_bytes": None, "disk_size_bytes": None, "is_disk_full": node["node_id"] == "n2"}
        route.fulfill(json=report)

    page.route("**/api/status", as_of_older_nodes)
    page.reload()
    expect(disks).to_have_text([re.compile("^n0.*free of"), re.compile("^n1.$"), "n2nearly full"])


def test_page_shows_the_streams_that_write(page: Page) -> None:
    orders = page.locator("details.group").first
    expect(orders.locator("li").filter(has_text="revenue")).to_contain_text("micro-batch 0 committed")
    expect(orders.locator("li").filter(has_text="nothing committed yet")).to_contain_text("1 open transaction")


def test_foreign_text_is_shown_and_never_rendered(page: Page) -> None:
    orders = page.locator("details.group").first
    expect(orders.get_by_text(EVIL).first).to_be_visible()  # a reader's name, a query's id
    page.get_by_label("From index").fill("0")
    page.get_by_role("button", name="Search", exact=True).click()
    page.get_by_role("button", name="Newer").click()
    expect(page.locator("#found")).to_contain_text("from index 2")
    evil = page.locator(".message").filter(has_text="onerror").first
    evil.click()
    expect(evil.locator("pre")).to_have_text(EVIL)
    assert page.locator("main img, main script, main iframe").count() == 0
    assert page.evaluate("typeof taken") == "undefined"
    assert page.evaluate("[...document.scripts].length") == 1


def test_body_without_message_is_shown_as_text_or_in_hexadecimal_digits(page: Page) -> None:
    bodies = page.locator("#messages .message").filter(has_not=page.locator(".tag"))
    expect(bodies).to_have_count(2)
    expect(bodies.locator(".text")).to_have_text([EVIL, "00 ff 20 62 79 74 65 73"])
    bodies.last.click()
    expect(bodies.last.locator(".about")).to_contain_text("bytes in hexadecimal")


def test_messages_are_found_by_key_and_topic(page: Page) -> None:
    page.get_by_label("Key").fill("order-7")
    page.get_by_role("button", name="Search", exact=True).click()
    expect(page.locator(".message")).to_have_count(1)
    expect(page.locator(".message .text")).to_contain_text('{"order": 7}')
    page.get_by_label("Topic").fill("nothing")
    page.get_by_role("button", name="Search", exact=True).click()
    expect(page.locator("#found")).to_have_text("nothing found")
    page.get_by_role("button", name="Newest").click()
    expect(page.locator(".message").first).to_be_visible()


def test_wrong_search_is_explained(page: Page) -> None:
    page.get_by_label("From index").fill("x")
    page.get_by_role("button", name="Search", exact=True).click()
    expect(page.locator("#found.bad")).to_contain_text("from must be a number")


def test_policy_lets_the_page_ask_its_own_port_only(cluster: LocalCluster) -> None:
    port = int(cluster.page("n0").rsplit(":", 1)[1].strip("/"))
    found = fetch(port, "/")
    policy = dict(part.split(" ", 1) for part in found.headers["content-security-policy"].split("; "))
    assert (policy["default-src"], policy["connect-src"], policy["base-uri"]) == ("'none'", "'self'", "'none'")
    assert "unsafe" not in found.headers["content-security-policy"]
    assert re.findall(r"(?:src|href)=\"(?!data:,)[^\"]*\"", found.text) == []
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\bhttps?://(?!www\.w3\.org/2000/svg)", found.text
    )


def test_page_follows_a_killed_node_and_its_own(browser: Browser, cluster: LocalCluster, tmp_path: Path) -> None:
    """Runs last: it kills nodes of the cluster that the tests share."""
    with browser.new_context() as context:
        tab = context.new_page()
        tab.goto(cluster.page("n0"))
        heading = tab.get_by_role("heading", level=1)
        expect(heading).to_have_text("Healthy", timeout=60_000)
        cluster.kill("n2")
        expect(heading).to_have_text("Degraded", timeout=60_000)
        expect(tab.locator("#verdict")).to_contain_text("n2 does not answer")
        for width in WIDTHS:
            found = look_at(browser, cluster.page("n0"), tmp_path, width=width, name="degraded", ready=READY)
            assert found.complaints == []
        cluster.kill("n1")
        expect(heading).to_have_text("Unavailable", timeout=60_000)
        cluster.kill("n0")
        expect(heading).to_have_text("No answer", timeout=60_000)
        expect(tab.locator("details.group")).to_have_count(2)  # the last report stays
