import json
import shutil

import pytest

from isojax.tokenizer import TINY, Tokenizer, cut_at_stop


@pytest.fixture(scope="module")
def tiny():
    return Tokenizer()


def copy_of_tiny(tmp_path, **settings):
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    own = json.loads((TINY / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own | settings))
    return tmp_path


def test_shipped_tokenizer(tiny):
    assert tiny.vocab_size == 512
    assert tiny.eos_ids == (2,) and tiny.pad_id == 0 and tiny.bos_id is None
    assert len(tiny.encode("1234")) == 4  # digits stand alone


@pytest.mark.parametrize("text", ["", "a b", " x\n\n y\t", "é 漢字 😀", "-12 + 7 =", "\x00\x7f"])
def test_text_survives(tiny, text):
    assert tiny.decode(tiny.encode(text)) == text


def test_chat_template_and_special_ids(tiny):
    text = tiny.render([{"role": "system", "content": "s"}, {"role": "user", "content": "q"}])
    assert text == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tiny.encode(text)
    assert ids.count(1) == 3 and ids.count(2) == 2
    assert tiny.decode(ids, keep_special=True) == text
    assert "<|im_start|>" not in tiny.decode(ids)
    assert not tiny.render([{"role": "user", "content": "q"}], generate=False).endswith(
        "assistant\n"
    )


def test_eos_ids_of_a_model_folder(tmp_path):
    folder = copy_of_tiny(tmp_path, eos_token={"content": "<|im_end|>", "special": True})
    (folder / "config.json").write_text('{"text_config": {"eos_token_id": 0}}')
    assert Tokenizer(folder).eos_ids == (2, 0)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    assert Tokenizer(folder).eos_ids == (2, 1)


def test_templates_in_files_lists_and_errors(tmp_path, tiny):
    folder = copy_of_tiny(tmp_path, chat_template=[{"name": "default", "template": "{{ x }}"}])
    assert Tokenizer(folder).render([], x=3) == "3"
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no ' + eos_token) }}")
    with pytest.raises(ValueError, match=r"no <\|im_end\|>"):
        Tokenizer(folder).render([])
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="chat template"):
        Tokenizer(folder).render([])
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match="chat template"):
        Tokenizer(folder)
    (folder / "chat_template.jinja").unlink()
    plain = Tokenizer(copy_of_tiny(tmp_path, chat_template=None))
    assert not plain.has_chat_template and tiny.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        plain.render([])


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("tokenizer_config.json", "[]", "tokenizer_config.json: not an object"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: not JSON"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template is no text"),
        ("tokenizer_config.json", '{"chat_template": [5, {"name": "default", "template": 6}]}',
         "chat_template is no text"),
        ("config.json", '{"text_config": [], "eos_token_id": ["a"]}', 'eos_token_id is ."a".'),
        ("chat_template.jinja", "\udcff", "chat_template.jinja: not UTF-8"),
    ],
)  # fmt: skip
def test_damaged_settings_are_named(file, text, message, tmp_path):
    folder = copy_of_tiny(tmp_path)
    (folder / file).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message) as error:
        Tokenizer(folder)
    assert str(folder) in str(error.value)


def test_folders_without_a_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match="no tokenizer.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json"):
        Tokenizer(tmp_path)


def test_text_is_cut_at_the_first_stop_string():
    assert cut_at_stop("the answer", ["sw", "e a"]) == "th"
    assert cut_at_stop("the answer", ["x"]) == "the answer"
