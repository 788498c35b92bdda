"""JSON files that others wrote: errors name the file and say what is wrong with it."""

import json
from pathlib import Path
from typing import Any


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      FileNotFoundError: there is no such file, or no such folder.
      ValueError: it is not UTF-8, not JSON, or not an object.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is not a folder")
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not an object: {json.dumps(value)[:40]}")
    return value
