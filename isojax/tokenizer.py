"""Text to token ids and back: any `tokenizer.json`, its special ids, its chat template."""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from isojax.files import json_object

TINY = Path(__file__).parent / "assets" / "tiny_tokenizer"

Message = Mapping[str, Any]


class Tokenizer:
    """A tokenizer of a Hugging Face folder.

    vocab_size: ids are below it; a model's embedding may have more rows.
    eos_ids: ids that end a response: the tokenizer's own and those of generation_config.json
      (without that file, of config.json).
    pad_id, bos_id: or None.
    """

    def __init__(self, folder: str | Path = TINY) -> None:
        """Read tokenizer.json and, where they exist, the settings beside it.

        Raises:
          FileNotFoundError: there is no tokenizer.json.
          ValueError: it is not one.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path}: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        settings = _read_json(folder / "tokenizer_config.json")
        self._special = _special_tokens(settings) | _special_tokens(
            _read_json(folder / "special_tokens_map.json")
        )
        generation = folder / "generation_config.json"
        model = _read_json(generation if generation.is_file() else folder / "config.json")
        text = model.get("text_config")
        eos = (text if isinstance(text, Mapping) and text else model).get("eos_token_id")
        listed = eos if isinstance(eos, list) else [eos]
        if any(id is not None and type(id) is not int for id in listed):
            raise ValueError(f"{folder}: eos_token_id is {json.dumps(eos)[:40]}, not of integers")
        own = self._special_id("eos_token")
        self.eos_ids: tuple[int, ...] = tuple(
            dict.fromkeys(id for id in (own, *listed) if id is not None)
        )
        self.pad_id = self._special_id("pad_token")
        self.bos_id = self._special_id("bos_token")
        self._template = _compile(_template_source(folder, settings))

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Special tokens written in the text become their ids; none are added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD, ids of no token nothing."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not keep_special)

    def render(
        self, messages: Sequence[Message], *, generate: bool = True, **variables: Any
    ) -> str:
        """Messages ({"role": ..., "content": ...}) in the chat template.

        generate: end with the opening of the assistant's turn. variables: further variables of the
          template, such as enable_thinking.

        Raises:
          ValueError: there is no template, or it refuses the messages.
        """
        if self._template is None:
            raise ValueError("this tokenizer has no chat template: set data.chat_template = false")
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=generate,
                **self._special,
                **variables,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template: {error}") from error

    def _special_id(self, name: str) -> int | None:
        token = self._special.get(name)
        return None if token is None else self._tokenizer.token_to_id(token)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """`text` up to the first stop string in it."""
    ends = [at for at in (text.find(string) for string in stop) if at >= 0]
    return text[: min(ends)] if ends else text


def _read_json(path: Path) -> dict[str, Any]:
    return json_object(path) if path.is_file() else {}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """{"eos_token": "<|im_end|>", ...}; a token is a string or an object with its content."""
    found = {}
    for name, token in settings.items():
        content = token.get("content") if isinstance(token, Mapping) else token
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _template_source(folder: Path, settings: Mapping[str, Any]) -> str | None:
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        try:
            return own_file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{own_file}: not UTF-8") from None
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        entries = (entry for entry in template if isinstance(entry, Mapping))
        template = next((e.get("template") for e in entries if e.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{folder / 'tokenizer_config.json'}: chat_template is no text")
    return template


def _compile(source: str | None) -> jinja2.Template | None:
    """A template in the environment that chat templates are written for, sandboxed."""
    if source is None:
        return None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda text: datetime.datetime.now().strftime(text)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"chat template: {error}") from error
