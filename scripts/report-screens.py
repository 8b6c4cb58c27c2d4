"""Takes screenshots of a report in a browser: light and dark, desktop and phone.

    python scripts/report-screens.py PAGE.html FOLDER NAME

Writes NAME-light-1280.png and three other pictures of the whole page. Reports what pictures do not show: whether the
page is wider than the screen, whether it fetched anything, and whether labels of charts overlap. report-screens.sh
generates the page. Needs playwright, Pillow and the system's chromium.
"""

import pathlib
import sys

from PIL import Image
from playwright.sync_api import sync_playwright

# Pairs of texts of one chart that overlap by more than a pixel.
OVERLAPS = """
() => {
  const found = [];
  for (const svg of document.querySelectorAll('.drawing > svg')) {
    const texts = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
    texts.forEach(([one, a], index) => texts.slice(index + 1).forEach(([other, b]) => {
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 1 && down > 3) found.push(`${svg.getAttribute('aria-label')}: "${one}" on "${other}"`);
    }));
  }
  return found;
}
"""

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def main(page: str, folder: str, name: str) -> int:
    target, problems = pathlib.Path(folder), 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        for scheme in ("light", "dark"):
            for width in (1280, 390):
                tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
                requests, messages = [], []
                tab.on("request", lambda request: requests.append(request.url))
                tab.on("console", lambda message: messages.append(message.text))
                tab.goto(pathlib.Path(page).resolve().as_uri())
                picture = target / f"{name}-{scheme}-{width}.png"
                tab.screenshot(path=picture, full_page=True)
                # The page has few colours, so a palette of 128 saves most of the bytes.
                Image.open(picture).convert("RGB").quantize(128).save(picture, optimize=True)
                wide = tab.evaluate("document.documentElement.scrollWidth") - width
                overlaps = tab.evaluate(OVERLAPS)
                problems += (wide > 0) + (len(requests) > 1) + len(messages) + len(overlaps)
                print(f"{picture}: {picture.stat().st_size >> 10} KiB, {wide} px too wide, {len(requests) - 1} other requests")
                for line in messages + overlaps:
                    print(f"  {line}")
                tab.close()
        browser.close()
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
