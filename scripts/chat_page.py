#!/usr/bin/env python3
"""Checks the chat page in a browser, and takes screenshots.

    python3 -m venv client && client/bin/pip install websocket-client
    client/bin/python scripts/chat_page.py http://127.0.0.1:8080/ FOLDER

Drives Debian's `chromium` over its debugging port: sends messages, stops an answer, opens the settings, and writes
screenshots, light and dark, 1280 and 390 pixels wide. Exits with 1 if the page sends a request to another server,
throws an exception, or is wider than the window.
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

    wide = []
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
    evaluate('document.querySelector("details").open = true')
    screenshot("settings-dark", 1280, True)
    screenshot("settings-phone-light", 390, False)
    send_command("Runtime.enable")
    asked = {event["params"]["request"]["url"] for event in events if event.get("method") == "Network.requestWillBeSent"}
    foreign = sorted(one for one in asked if not one.startswith((url, "data:")))
    wrong = [event for event in events if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")]
    print(f"requests to others: {foreign}; problems: {wrong}; wider than the window: {any(wide)}")
    print(evaluate('[...document.getElementById("talk").children].map(it => it.className + ": " + it.textContent.slice(0, 80)).join("\\n")'))
    sys.exit(1 if foreign or wrong or any(wide) else 0)
finally:
    browser.kill()
    browser.wait()
