#!/usr/bin/env python3
"""Checks the chat page in a browser, and takes screenshots.

    python3 -m venv client && client/bin/pip install websocket-client
    client/bin/python scripts/chat_page.py http://127.0.0.1:8080/ FOLDER

Drives Debian's `chromium` over its debugging port: sends messages, stops an answer, reloads the page, opens the settings,
shows Markdown, and writes screenshots, light and dark, 1280, 390 and 360 pixels wide. Exits with 1 if the page sends a
request to another server, throws an exception, loses the conversation, shows Markdown wrongly, or is wider than the
window.
"""

import base64
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.request

import websocket

url, folder = sys.argv[1], pathlib.Path(sys.argv[2])
PORT = 9555
profile = tempfile.TemporaryDirectory()
browser = subprocess.Popen(
    [
        "chromium", "--headless=new", "--no-sandbox", "--disable-gpu", f"--remote-debugging-port={PORT}",
        "--remote-allow-origins=*", f"--user-data-dir={profile.name}", "about:blank",
    ],
    stderr=subprocess.DEVNULL,
)
try:
    for _ in range(150):
        try:
            tabs = json.load(urllib.request.urlopen(f"http://127.0.0.1:{PORT}/json"))
            break
        except OSError:
            time.sleep(0.2)
    page = next(tab for tab in tabs if tab["type"] == "page")
    socket = websocket.create_connection(page["webSocketDebuggerUrl"], timeout=60)
    events, number = [], 0

    def send_command(method, **parameters):
        global number
        number += 1
        socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(socket.recv())
            if answer.get("id") == number:
                return answer.get("result", answer)
            events.append(answer)

    def evaluate(expression):
        result = send_command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return result["result"].get("value")

    def screenshot(name, width, is_dark):
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        send_command("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        send_command("Emulation.setEmulatedMedia", features=[scheme])
        time.sleep(0.4)
        wide.append(evaluate("document.documentElement.scrollWidth > innerWidth"))
        picture = base64.b64decode(send_command("Page.captureScreenshot", format="png")["data"])
        (folder / f"{name}.png").write_bytes(picture)

    def ask(text, waits=True):
        text = json.dumps(text)
        evaluate(f'document.getElementById("text").value = {text}; document.getElementById("ask").requestSubmit()')
        while waits and evaluate('document.getElementById("go").disabled'):
            time.sleep(0.1)

    # Markdown, and the elements that it must become; text that looks like HTML stays text.
    MARKDOWN = """# Title

Some **bold** and *italic* text with `code`, <b>no tag</b> and [a link](https://example.org/a).

1. one
   - inner
2. two

| a | b |
| --- | --- |
| 1 | 2 |

> quoted

```python
x = "<script>"
"""
    EXPECTED = (
        '<h3>Title</h3><p>Some <strong>bold</strong> and <em>italic</em> text with <code>code</code>, &lt;b&gt;no tag&lt;/b&gt; and '
        '<a href="https://example.org/a" rel="noreferrer noopener" target="_blank">a link</a>.</p>'
        '<ol start="1"><li>one<ul><li>inner</li></ul></li><li>two</li></ol>'
        '<div class="wide"><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table></div>'
        '<blockquote><p>quoted</p></blockquote>'
        '<div class="code"><button type="button">Copy</button><pre><code>x = "&lt;script&gt;"\n</code></pre></div>'
    )

    wide, lost = [], []
    for domain in ["Runtime", "Log", "Network", "Page"]:
        send_command(f"{domain}.enable")
    send_command("Page.navigate", url=url)
    time.sleep(2.5)
    evaluate('document.getElementById("max-tokens").value = 60')
    ask("Who art thou?")
    time.sleep(2.5)
    ask("And whence comest thou?")
    evaluate('document.getElementById("max-tokens").value = ""')
    ask("Tell me of the kings of Israel", waits=False)
    screenshot("under-way-light", 1280, False)
    evaluate('document.getElementById("stop").click()')
    time.sleep(2.5)
    screenshot("phone-dark", 390, True)
    shown = 'JSON.stringify([...document.querySelectorAll(".message")].map(it => it.textContent))'
    told = evaluate(shown)
    send_command("Page.reload")
    time.sleep(2.5)
    if evaluate(shown) != told or len(json.loads(told)) < 6:
        lost.append("the conversation after a reload")
    html = evaluate(f'element("div", ...blocks({json.dumps(MARKDOWN)})).innerHTML')
    if html != EXPECTED:
        lost.append(f"Markdown: {html}")
    evaluate(f'show("assistant").update({json.dumps(MARKDOWN)}, "I think about it.")')
    screenshot("markdown-light", 1280, False)
    screenshot("markdown-narrow-dark", 360, True)
    evaluate('document.getElementById("settings").open = true')
    screenshot("settings-dark", 1280, True)
    screenshot("settings-phone-light", 390, False)
    screenshot("settings-narrow-light", 360, False)
    evaluate('document.getElementById("settings").open = false; document.getElementById("new").click()')
    if evaluate(shown) != "[]":
        lost.append("the new conversation is not empty")
    screenshot("new-light", 360, False)
    send_command("Runtime.enable")
    asked = {event["params"]["request"]["url"] for event in events if event.get("method") == "Network.requestWillBeSent"}
    foreign = sorted(one for one in asked if not one.startswith((url, "data:")))
    wrong = [event for event in events if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")]
    print(f"requests to others: {foreign}; problems: {wrong}; wider than the window: {any(wide)}; wrong: {lost}")
    print(evaluate('[...document.getElementById("talk").children].map(it => it.className + ": " + it.textContent.slice(0, 80)).join("\\n")'))
    sys.exit(1 if foreign or wrong or any(wide) or lost else 0)
finally:
    browser.kill()
    browser.wait()
