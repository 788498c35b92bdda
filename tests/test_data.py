import dataclasses
import json
import logging

import jinja2
import pytest

from isojax.config import DataConfig
from isojax.rl import data
from isojax.rl.data import DataError, prompt_stream
from isojax.tokenizer import Tokenizer

TASK = DataConfig(task_config={"max_terms": 2, "max_digits": 1}, max_prompt_tokens=64)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer()


def stream(tokenizer, config, seed=0, position=0):
    return prompt_stream(config, tokenizer, seed, position)


def jsonl(tmp_path, rows, **changes):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return DataConfig(source="jsonl", path=str(path), reward="exact", **changes)


def test_task_stream_is_deterministic_and_resumes(tokenizer):
    whole = stream(tokenizer, TASK).take(40)
    first = stream(tokenizer, TASK)
    first.take(17)
    assert stream(tokenizer, TASK, position=first.position).take(23) == whole[17:]
    assert stream(tokenizer, TASK, seed=1).take(40) != whole
    assert [prompt.index for prompt in whole] == list(range(40))


def test_task_stream_crosses_its_blocks(tokenizer):
    across = stream(tokenizer, TASK, position=1020).take(8)
    assert stream(tokenizer, TASK, position=1026).take(2) == across[6:]
    assert len({prompt.text for prompt in across}) > 4


def test_prompt_is_rendered_and_its_answer_ends(tokenizer):
    source = stream(tokenizer, dataclasses.replace(TASK, system_prompt="Be brief."))
    (prompt,) = source.take(1)
    assert prompt.text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert prompt.text.endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(prompt.tokens, keep_special=True) == prompt.text
    assert str(eval(prompt.row["metadata"]["expression"])) == prompt.answer
    ids = source.answer_tokens(prompt)
    assert ids[-1] == 2 and tokenizer.decode(ids) == prompt.answer


def test_unknown_task_and_setting(tokenizer):
    with pytest.raises(ValueError, match="no_such_task"):
        stream(tokenizer, DataConfig(task="no_such_task"))
    with pytest.raises(ValueError, match="max_trems"):
        stream(tokenizer, DataConfig(task_config={"max_trems": 2}))


def test_jsonl_order_epochs_and_types(tokenizer, tmp_path):
    rows = [{"prompt": f"q{i}", "answer": i} for i in range(5)]
    config = jsonl(tmp_path, rows, shuffle=False, chat_template=False)
    assert [p.text for p in stream(tokenizer, config).take(7)] == [
        "q0", "q1", "q2", "q3", "q4", "q0", "q1",
    ]  # fmt: skip
    shuffled = dataclasses.replace(config, shuffle=True)
    texts = [p.text for p in stream(tokenizer, shuffled, seed=3).take(20)]
    epochs = [texts[i : i + 5] for i in range(0, 20, 5)]
    assert all(sorted(epoch) == sorted(texts[:5]) for epoch in epochs) and epochs[0] != epochs[1]
    later = stream(tokenizer, shuffled, seed=3, position=12).take(8)
    assert [p.text for p in later] == texts[12:]
    assert later[0].answer == later[0].text[1:]


def test_dapo_schema_in_parquet(tokenizer, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"What is {i}?"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(i), "style": "rule"},
            "extra_info": {"index": "x"},
        }
        for i in range(3)
    ]
    table = pyarrow.Table.from_pylist(rows)
    for part in range(2):
        parquet.write_table(table, tmp_path / f"part-{part}.parquet")
    config = DataConfig(source="parquet", path=str(tmp_path), reward="math", shuffle=False)
    prompts = stream(tokenizer, config).take(7)
    assert [p.answer for p in prompts] == list("0120120")
    assert "What is 1?" in prompts[1].text and "ability" not in prompts[1].row


def test_long_prompts_are_left_out_and_counted(tokenizer, tmp_path, caplog):
    rows = [{"prompt": "x " * n, "answer": "1"} for n in (3, 300, 4, 400)]
    config = jsonl(tmp_path, rows, shuffle=False, chat_template=False, max_prompt_tokens=50)
    source = stream(tokenizer, config)
    with caplog.at_level(logging.WARNING):
        prompts = source.take(3)
    assert [p.index for p in prompts] == [0, 2, 4]
    assert source.skipped == 2 and source.position == 5
    assert "left out 2 prompts" in caplog.text


def test_only_long_prompts_is_an_error(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_GIVE_UP", 20)
    config = jsonl(tmp_path, [{"prompt": "x " * 99, "answer": "1"}], max_prompt_tokens=10)
    with pytest.raises(ValueError, match="20 prompts in a row are longer"):
        stream(tokenizer, config).take(1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}', "line 1: no answer or reward_model.ground_truth .columns: prompt"),
        ('{"answer": "a"}', "line 1: no prompt"),
        ('{"prompt": 3, "answer": "a"}', "must be text .*, not a number"),
        ('{"prompt": "a", "answer": 1}\n{oops', "rows.jsonl, line 2: not JSON"),
        ("[1]", "line 1: not an object but a list"),
        ('{"prompt": " ", "answer": "a"}', "line 1: prompt is empty"),
        ('{"prompt": [], "answer": "a"}', "line 1: prompt is empty"),
        ('{"prompt": "a", "reward_model": "4"}', "reward_model must be a table .*, not text"),
        ('{"prompt": "a", "answer": ["4"]}', "answer must be text or a number, not a list"),
        ('{"prompt": "a", "answer": NaN}', "no answer"),
        ('{"prompt": "a\\ud800", "answer": "4"}', "prompt holds a lone surrogate at character 2"),
        ('{"prompt": "a", "answer": "\\udc00"}', "answer holds a lone surrogate at character 1"),
        ("", "has no rows"),
    ],
)
def test_bad_files_name_the_place(tokenizer, tmp_path, text, message):
    config = jsonl(tmp_path, [])
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        stream(tokenizer, config)


def test_every_row_is_looked_at_when_the_file_is_opened(tokenizer, tmp_path):
    good, bad = {"prompt": "a", "answer": 1}, {"prompt": "a", "answer": None}
    config = jsonl(tmp_path, [good, *[bad] * 12, good])
    with pytest.raises(DataError, match="rows.jsonl: 12 of 14 rows cannot be used") as error:
        stream(tokenizer, config)
    lines = str(error.value).splitlines()
    # every row is followed by an empty line, which counts
    assert [line.split(":")[0].rpartition(" ")[2] for line in lines[1:11]] == [
        str(number) for number in range(3, 23, 2)
    ]
    assert lines[11:] == ["  and 2 more"]


def test_bad_parquet_rows_are_named_in_their_file(tokenizer, tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(data, "_BATCH", 2)
    for part, answers in enumerate((["1", "2", "3"], ["4", None, "6"])):
        table = pyarrow.table({"prompt": ["a"] * 3, "answer": answers})
        parquet.write_table(table, tmp_path / f"part-{part}.parquet")
    config = DataConfig(source="parquet", path=str(tmp_path), reward="exact")
    with pytest.raises(DataError, match="1 of 6 rows(.|\n)*part-1.parquet, row 2: no answer"):
        stream(tokenizer, config)
    (tmp_path / "README.md").write_text("about")
    with pytest.raises(DataError, match=r"README.md: (.|\n)*pattern(.|\n)*/\*.parquet"):
        stream(tokenizer, config)


def test_encodings(tokenizer, tmp_path):
    config = jsonl(tmp_path, [], shuffle=False, chat_template=False)
    line = '{"prompt": "é", "answer": 1}\n'
    (tmp_path / "rows.jsonl").write_bytes(line.encode("utf-8-sig"))
    assert stream(tokenizer, config).take(1)[0].text == "é"
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "e"}\n' + line.encode("latin-1"))
    with pytest.raises(DataError, match="rows.jsonl, line 2, byte 13: not UTF-8"):
        stream(tokenizer, config)


def test_messages_that_the_template_refuses_are_found_at_the_start(tmp_path):
    tokenizer = Tokenizer()
    tokenizer._template = jinja2.Environment().from_string(
        "{% if messages[0].role != 'user' %}{{ undefined.x }}{% endif %}"
    )
    rows = [{"prompt": [{"role": role, "content": "a"}], "answer": 1} for role in ("user", "tool")]
    with pytest.raises(DataError, match="rows.jsonl, line 3: chat template"):
        stream(tokenizer, jsonl(tmp_path, rows))


def test_absent_file(tokenizer, tmp_path):
    config = DataConfig(source="jsonl", path=str(tmp_path / "*.jsonl"), reward="exact")
    with pytest.raises(ValueError, match="names no file"):
        stream(tokenizer, config)
