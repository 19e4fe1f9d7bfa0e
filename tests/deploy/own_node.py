"""Starts Riffle's own node with the settings that ``riffle conformance`` wrote."""

import json
import os
import sys
from pathlib import Path

from riffle.deploy.cli.main import main


def use_settings(file: Path) -> None:
    """Writes the files that this node needs, and puts the settings into the environment."""
    settings = json.loads(file.read_text())
    (node_id,) = json.loads(Path(settings["users_file"]).read_text())
    texts = {
        "credentials": json.dumps([{"node_id": node_id, "token": settings.pop("node_token")}]),
        "analyzer_keys": "\n".join(settings.pop("analyzer_keys")),
    }
    for name, text in texts.items():
        file.with_name(name).write_text(text)
        settings[f"{name}_file"] = str(file.with_name(name))
    settings["state_dir"] = str(file.with_name("state"))
    for name, value in settings.items():
        text = value if isinstance(value, str) else json.dumps(value)
        os.environ[f"RIFFLE_NODE_{name.upper()}"] = text


if __name__ == "__main__":
    use_settings(Path(os.environ["RIFFLE_CONFORMANCE"]))
    sys.argv = ["riffle", "node"]
    main()
