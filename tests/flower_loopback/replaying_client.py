"""A client without JAX, which sends a recorded upload, or does what no client should do.

It stands in for client_app.py in a copy of the app. The node's configuration has `recorded`, a
folder with the uploads and with faults.json: by round and client, what goes wrong.
"""

import json
import os
import signal
import struct
import time
from pathlib import Path

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
HUGE = json.dumps({"x": {"dtype": "F32", "shape": [2_500_000_000], "data_offsets": [0, 10**10]}})


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    about = dict(message.content["fisherjax"])
    about["partition-id"] = context.node_config["partition-id"]
    return Message(RecordDict({"fisherjax": ConfigRecord(about)}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    place, folder = context.node_config["partition-id"], Path(context.node_config["recorded"])
    number = message.content["fisherjax"]["round"]
    asked = folder / f"asked-{number}-{place}"
    first = not asked.exists()
    asked.touch()
    fault, *how = json.loads((folder / "faults.json").read_text()).get(f"{number}-{place}", [""])
    about = json.loads((folder / f"{place}.json").read_text()) | {"round": number}
    file = folder / f"{place}.safetensors"
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "sleep" or (fault == "sleep once" and first):
        time.sleep(how[0])
    if fault == "raise":
        raise ValueError(how[0])
    if fault == "claim":
        about["examples"] = how[0]
    if fault == "send":
        file = folder / how[0]
    data = {"garbage": os.urandom(100_000), "huge": struct.pack("<Q", len(HUGE)) + HUGE.encode()}
    content = data[fault] if fault in data else file.read_bytes()
    array = Array("uint8", (len(content),), "fisherjax.safetensors", content)
    records = {"fisherjax": ConfigRecord(about), "file": ArrayRecord({"file": array})}
    records["seconds"] = MetricRecord({"work": 0.0})
    (folder / f"answered-{number}-{place}").touch()
    return Message(RecordDict(records), reply_to=message)
