"""Compare two backends from a program: python api_example.py [address] [picture.png]"""

import base64
import sys
from pathlib import Path

from gradio_client import Client, handle_file

client = Client(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7860", verbose=False)
print([backend["id"] for backend in client.predict("demo-dit", api_name="/backends")])

result = client.predict("shark", ["dense", "blr-torch"], steps=10, api_name="/generate")
print(result["report"]["verdict"])
for backend, pictures in result["images"].items():
    Path(f"{backend}.png").write_bytes(base64.b64decode(pictures[0].partition(",")[2]))

picture = sys.argv[2] if len(sys.argv) > 2 else "dense.png"
result = client.predict(handle_file(picture), ["dense", "blr-torch"], api_name="/classify")
for backend, classes in result["top"].items():
    print(backend, classes[0]["label"], f"{classes[0]['probability']:.0%}")
