"""The page in a real browser: every plot has marks that can be seen, nothing sticks out at two widths, the console stays empty."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from specforge import cli

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine (Debian: apt-get install chromium)"),
]
WIDTHS = (1400, 500)  # headless chromium makes no window narrower than 500
NUM_PLOTS = 11

# Runs in the page after its own script: uses what a person would use, then measures what can be seen.
PROBE = """
const press = (selector) => document.querySelector(selector).dispatchEvent(new MouseEvent("click", { bubbles: true }));
const seen = (mark) => {
  const style = getComputedStyle(mark), box = mark.getBoundingClientRect();
  const paint = mark.matches(".line, .spread") ? style.stroke : style.fill;
  return style.display !== "none" && paint !== "none" && !paint.startsWith("rgba(0, 0, 0, 0") && box.width + box.height > 0;
};
const plots = [...document.querySelectorAll("svg.plot")].map((svg) => {
  const marks = [...svg.querySelectorAll(".mark")], frame = svg.getBoundingClientRect();
  const names = [...svg.querySelectorAll("text.name")].map((text) => text.textContent);
  const smallest = Math.min(...[...svg.querySelectorAll("text")].map((text) => text.getBoundingClientRect().height));
  const out = marks.filter((mark) => { const b = mark.getBoundingClientRect(); return b.left < frame.left - 4 || b.right > frame.right + 4; });
  return { title: svg.getAttribute("aria-label"), marks: marks.length, seen: marks.filter(seen).length,
           runs: [...new Set(marks.map((m) => m.dataset.run))].length,
           colors: [...new Set(marks.map((m) => getComputedStyle(m).getPropertyValue("--c")))].length, names, smallest, out: out.length, width: frame.width };
});
const overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
const ground = () => getComputedStyle(document.body).backgroundColor;
const light = ground();
press("#theme");
const dark = ground();
let hidden = null;
if (document.querySelector('.legend button[data-run="0"]')) {
  press('.legend button[data-run="0"]');
  hidden = [...document.querySelectorAll('.mark[data-run="0"]')].filter(seen).length;
  press('.legend button[data-run="0"]');
}
const svg = document.querySelector("svg.lines"), box = svg.getBoundingClientRect();
svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + 0.9 * box.width, clientY: box.top + 40, bubbles: true }));
const tip = svg.parentElement.querySelector(".tip");
const said = tip.classList.contains("hidden") ? "" : tip.textContent;
const result = document.createElement("pre");
result.id = "measured";
result.textContent = JSON.stringify({ plots, overflow, light, dark, hidden, said, back: [...document.querySelectorAll(".mark")].filter(seen).length });
document.body.append(result);
"""


def chromium(page: Path, width: int, *arguments: str, profile: Path) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", f"--user-data-dir={profile}",
               f"--window-size={width},2400", *arguments, page.as_uri()]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def console(output: str) -> list[str]:
    return [line for line in output.splitlines() if ":CONSOLE" in line]


def measure(page: Path, width: int, profile: Path) -> tuple[dict[str, Any], list[str]]:
    probed = page.with_name(f"probed-{width}.html")
    text = page.read_text(encoding="utf-8")
    probed.write_text(text.replace("</body>", f"<script>{{{PROBE}}}</script></body>"), encoding="utf-8")
    done = chromium(probed, width, "--dump-dom", profile=profile)
    found = re.search(r'<pre id="measured">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found[1])), console(done.stderr)


@pytest.fixture
def page(make_run, tmp_path: Path) -> Path:
    long_name = "a-run-with-a-rather-long-name-that-has-to-be-broken-somewhere-when-the-window-is-narrow"
    runs = [make_run("first", (1.1, 1.3, 1.5, 1.6), accept=1.5), make_run(long_name, (1.2, 1.6, 1.9, 1.85), accept=1.9, lr=2e-3)]
    path = tmp_path / "report.html"
    assert cli.main(["report", *map(str, runs), "--output", str(path)]) == 0
    return path


@pytest.mark.parametrize("width", WIDTHS)
def test_what_a_person_sees(page: Path, width: int, tmp_path: Path) -> None:
    shot = tmp_path / f"report-{width}.png"
    done = chromium(page, width, f"--screenshot={shot}", profile=tmp_path / "profile")
    assert shot.is_file() and shot.stat().st_size > 20_000 and console(done.stderr) == []

    found, said = measure(page, width, tmp_path / "profile")
    assert said == []
    assert len(found["plots"]) == NUM_PLOTS and found["overflow"] == 0
    for plot in found["plots"]:
        assert plot["marks"] == plot["seen"] >= 2 and plot["out"] == 0, plot
        assert plot["runs"] == plot["colors"] == 2, plot
        assert len(plot["names"]) == 2 and all(plot["names"]) and plot["smallest"] >= 9 and 250 < plot["width"] <= width, plot
    assert found["light"] != found["dark"] and found["hidden"] == 0
    assert found["back"] == sum(plot["marks"] for plot in found["plots"])
    assert found["said"].startswith("step 4") and "first" in found["said"]


def test_a_page_without_numbers_is_quiet_too(make_run, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert cli.main(["report", str(make_run("r", (None,))), "--output", str(page)]) == 0
    found, said = measure(page, WIDTHS[0], tmp_path / "profile")
    assert said == [] and len(found["plots"]) == 5 and found["overflow"] == 0


def test_an_error_in_the_console_would_be_seen(page: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace('"use strict";', '"use strict"; nothing.like_it();'))
    done = chromium(broken, WIDTHS[0], "--dump-dom", profile=tmp_path / "profile")
    assert any("nothing is not defined" in line for line in console(done.stderr))
