"""From rows of text to packed batches: every token once, masks in place, bad rows named, the position resumable."""

import itertools
import json

import numpy as np
import pytest

from kvpop_jax.config import DataConfig
from kvpop_jax.errors import UserError
from kvpop_jax.evaluation.tasks import maths
from kvpop_jax.models import encode_prompt
from kvpop_jax.training.data import make_iterator, to_batch
from kvpop_jax.training.documents import Encoder, encode
from kvpop_jax.training.sources import Row, open_source

SEQ = 24


def _write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _texts(lengths, start=2):
    """Documents of different words, one token shorter than their length: the end of text is added."""
    word = itertools.count(start)
    return [{"text": " ".join(f"w{next(word) % 62 + 2}" for _ in range(length - 1))} for length in lengths]


def _encoder(tokenizer, **changes):
    settings = dict(seq_len=SEQ, overlong="skip", loss_tokens="all", longest_prompt=None, own_row=False)
    return Encoder(tokenizer, **(settings | changes))


def _iterator(tokenizer, paths, *, batch_size=2, seed=0, workers=0, packing="segments", **encoder):
    settings = DataConfig(paths=tuple(map(str, paths)), packing=packing, workers=workers)
    encoder = _encoder(tokenizer, own_row=packing == "none", **encoder)
    return make_iterator(
        open_source(settings, 0),
        encoder,
        settings,
        batch_size=batch_size,
        seed=seed,
    )


def _documents(arrays):
    """Token tuples of the documents of a batch, cut out by their segment."""
    for token_S, segment_S in zip(arrays["token"], arrays["segment"], strict=True):
        for segment in np.unique(segment_S[segment_S > 0]):
            yield tuple(token_S[segment_S == segment].tolist())


@pytest.mark.parametrize("task", [*maths.SOURCES, "gpqa_diamond", "livecodebench_v6"])
def test_benchmarks_are_not_trained_on(tmp_path, task):
    """Nor as part of a folder that is named for other files."""
    file = maths.SOURCES[task].file if task in maths.SOURCES else f"{task}.jsonl"
    _write(tmp_path / "a.jsonl", [{"text": "w2"}])
    _write(tmp_path / file, [{"problem": "w3", "response": "w4"}])
    with pytest.raises(UserError, match=rf"data\.paths: .*{file} is named as a benchmark's"):
        open_source(DataConfig(paths=(str(tmp_path),)), 0)


@pytest.mark.core
def test_every_document_is_met_whole_and_once_per_epoch(tmp_path, plain_tokenizer):
    # 840 different documents of 3 to 14 tokens; the first two words of each are its number.
    rows = [{"text": " ".join([f"w{2 + n // 60}", f"w{2 + n % 60}"] + ["w3"] * (n % 12))} for n in range(840)]
    wanted = {(*plain_tokenizer.encode(row["text"]), 0) for row in rows}
    data = _iterator(plain_tokenizer, [_write(tmp_path / "a.jsonl", rows)])
    met = []
    while len(met) < 500:
        met += _documents(next(data))
    assert len(set(met)) == len(met)
    while len(met) < 1300:
        met += _documents(next(data))
    assert set(met) == wanted
    data.close()


def test_rows_are_packed_with_segments_and_restarting_positions(tmp_path, plain_tokenizer):
    data = _iterator(plain_tokenizer, [_write(tmp_path / "a.jsonl", _texts([10, 6, 5, 7, 11] * 4))])
    arrays = next(data)
    data.close()
    shared_rows = 0
    for segment_S, position_S, loss_S in zip(arrays["segment"], arrays["position"], arrays["loss"], strict=True):
        real = segment_S > 0
        assert np.all(np.diff(segment_S[real]) >= 0)
        assert not np.any(real[np.argmin(real) :]) or real.all()  # padding is at the end
        for segment in np.unique(segment_S[real]):
            inside = segment_S == segment
            np.testing.assert_array_equal(position_S[inside], np.arange(inside.sum()))
            # The first token of a document has nothing that could predict it.
            np.testing.assert_array_equal(loss_S[inside], np.arange(inside.sum()) > 0)
        shared_rows += len(np.unique(segment_S[real])) > 1
    assert shared_rows > 0


def test_shared_packing_makes_one_document_of_a_row(tmp_path, plain_tokenizer):
    rows = [{"prompt": "w5 w6", "response": "w7 w8 w9"}] * 20
    data = _iterator(plain_tokenizer, [_write(tmp_path / "a.jsonl", rows)], packing="shared")
    arrays = next(data)
    data.close()
    full = arrays["segment"] > 0
    assert set(np.unique(arrays["segment"])) <= {0, 1}
    np.testing.assert_array_equal(arrays["position"][full], np.broadcast_to(np.arange(SEQ), full.shape)[full])
    np.testing.assert_array_equal(arrays["prompt"].sum(axis=1), 2)  # the first document's prompt only


def test_without_packing_every_document_has_its_own_row(tmp_path, plain_tokenizer):
    path = _write(tmp_path / "a.jsonl", _texts([3, 4, 5, 40] * 3))
    data = _iterator(plain_tokenizer, [path], packing="none")
    for arrays in itertools.islice(data, 5):
        assert all(set(np.unique(row)) <= {0, row[0]} and row[0] > 0 for row in arrays["segment"])
    data.close()


@pytest.mark.parametrize(("overlong", "longest"), [("skip", 9), ("truncate", SEQ)])
def test_overlong_documents_are_skipped_or_cut_and_counted(tmp_path, plain_tokenizer, overlong, longest):
    path = _write(tmp_path / "a.jsonl", _texts([SEQ + 1, 9, SEQ + 30, 8] * 8))
    data = _iterator(plain_tokenizer, [path], overlong=overlong)
    arrays = [next(data) for _ in range(12)]
    data.close()
    lengths = {len(document) for batch in arrays for document in _documents(batch)}
    assert lengths == {8, 9} | {longest}
    counts = [to_batch(batch)[1] for batch in arrays]
    documents, overlong_met = (sum(count[name] for count in counts) for name in ("documents", "overlong"))
    assert overlong_met > 0
    met = documents + (overlong_met if overlong == "skip" else 0)
    assert abs(overlong_met / met - 0.5) < 0.15


def test_nothing_but_overlong_documents_is_an_error(tmp_path, plain_tokenizer):
    data = _iterator(plain_tokenizer, [_write(tmp_path / "a.jsonl", _texts([SEQ + 1] * 4))], batch_size=1)
    with pytest.raises(UserError, match=r"seq_len \(24\)"):
        to_batch(next(data))
    data.close()


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.core), 1])
def test_a_restored_iterator_gives_the_same_next_batches(tmp_path, plain_tokenizer, workers):
    path = _write(tmp_path / "a.jsonl", _texts([3, 9, 17, 24, 5, 8, 31] * 6))
    first = _iterator(plain_tokenizer, [path], workers=workers)
    for _ in range(7):
        next(first)
    state = json.loads(json.dumps(first.get_state()))
    wanted = [next(first) for _ in range(6)]
    again = _iterator(plain_tokenizer, [path], workers=workers)
    again.set_state(state)
    for batch in wanted:
        np.testing.assert_equal(next(again), batch)
    first.close()
    again.close()


def test_the_seed_decides_the_order(tmp_path, plain_tokenizer):
    path = _write(tmp_path / "a.jsonl", _texts([5] * 40))
    first, same, other = (_iterator(plain_tokenizer, [path], seed=seed) for seed in (1, 1, 2))
    batch = next(first)
    np.testing.assert_equal(next(same), batch)
    assert not np.array_equal(next(other)["token"], batch["token"])


@pytest.mark.core
def test_a_problem_is_encoded_as_it_is_asked_in_evaluation(chat_tokenizer):
    chat = ({"role": "user", "content": "take 1 2 3"}, {"role": "assistant", "content": "answer : 1 2 3"})
    prompt, response = encode(chat_tokenizer, Row("here", chat))
    assert prompt == encode_prompt(chat_tokenizer, "take 1 2 3")
    assert response[-1] == chat_tokenizer.eos_token_id
    assert chat_tokenizer.decode(response[:-1]).strip() == "answer : 1 2 3"


def test_a_chat_that_the_template_refuses_names_its_row(chat_tokenizer):
    chat = ({"role": "tool", "content": "take 1 2 3"}, {"role": "assistant", "content": "answer : 1 2 3"})
    with pytest.raises(UserError, match=r"^a\.jsonl:7: .* refuses the messages: .* knows the roles"):
        encode(chat_tokenizer, Row("a.jsonl:7", chat))


def test_loss_is_on_the_response_where_asked(plain_tokenizer):
    row = Row("here", prompt="w5 w6 w7", response="w8 w9")
    arrays = _encoder(plain_tokenizer, loss_tokens="response")(row)
    assert arrays["token"].tolist() == [5, 6, 7, 8, 9, 0]
    assert arrays["prompt"].tolist() == [1, 1, 1, 0, 0, 0]
    assert arrays["loss"].tolist() == [0, 0, 0, 1, 1, 1]


def test_a_pinned_prompt_that_leaves_no_pool_names_the_row(tmp_path, plain_tokenizer):
    path = _write(tmp_path / "a.jsonl", [{"prompt": "w5 w6 w7", "response": "w8"}])
    data = _iterator(plain_tokenizer, [path], longest_prompt=2)
    with pytest.raises(UserError, match=r"a\.jsonl:1: .* 3 tokens"):
        next(data)
    data.close()


BAD_ROWS = [
    ("not json", "JSON"),
    ("[1]", "object"),
    ('{"question": "x"}', "question"),
    ('{"prompt": "x"}', "`response`"),
    ('{"problem": 3, "response": "x"}', "`problem`"),
    ('{"text": ""}', "`text`"),
    ('{"messages": []}', "`messages`"),
    ('{"messages": [{"role": "user"}]}', "`content`"),
    ('{"messages": [{"role": "user", "content": "x"}]}', "assistant"),
]


@pytest.mark.parametrize(("line", "word"), BAD_ROWS)
def test_a_bad_row_names_its_file_and_line(tmp_path, line, word):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "w3"}\n\n' + line + "\n")
    with pytest.raises(UserError) as caught:
        open_source(DataConfig(paths=(str(path),)), 0)
    assert "rows.jsonl:3" in str(caught.value)
    assert word in str(caught.value)


def test_bad_paths_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "broken.parquet").write_text("x")
    (tmp_path / "blank.jsonl").write_text("\n")
    for name in ("nowhere.jsonl", "empty", "notes.txt", "broken.parquet", "blank.jsonl"):
        with pytest.raises(UserError, match=name):
            open_source(DataConfig(paths=(str(tmp_path / name),)), 0)


def test_folders_and_parquet_files_give_the_rows_of_jsonl(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"problem": f"w{n}", "response": "w3"} for n in range(5)]
    _write(tmp_path / "a.jsonl", rows)
    parquet.write_table(pyarrow.Table.from_pylist([row | {"id": 7} for row in rows]), tmp_path / "b.parquet")
    source = open_source(DataConfig(paths=(str(tmp_path),)), 0)
    assert len(source) == 10
    read = [(row.messages, row.response) for row in map(source.__getitem__, range(10))]
    assert read[:5] == read[5:]
    assert source[7].where.endswith("b.parquet: row 2")


def test_parquet_chats_are_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    chat = [{"role": "user", "content": "w4"}, {"role": "assistant", "content": "w5"}]
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": chat}]), tmp_path / "b.parquet")
    assert open_source(DataConfig(paths=(str(tmp_path / "b.parquet"),)), 0)[0].messages == chat
