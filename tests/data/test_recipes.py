"""Every recipe of the package, on invented rows in the data set's format."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oper.data import Folder, PreprocessOptions, analyze_folder, load_recipe, preprocess
from oper.data.generic import Choice, generic_recipe
from oper.data.recipe import Recipe, recipe_from_dict
from oper.errors import FileFormatError, InvalidInputError
from oper.support.files import datasets_root
from tests.data.loader_support import decoded, made
from tests.support import real_data

ONE_ID_EACH = PreprocessOptions(valid="0", test="0", min_count=1)


def read(tmp_path: Path, recipe: str | Recipe, files: dict[str, bytes],
         options: PreprocessOptions = ONE_ID_EACH) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the manifest and the columns of the training part, with ids replaced by raw values."""
    paths = []
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        paths.append(str(tmp_path / name))
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    return preprocess(recipe, paths, tmp_path / "out", options), decoded(tmp_path / "out")


CRITEO = "1\t" + "\t".join(str(k) for k in range(13)) + "\t" + "\t".join(
    f"{k * 2654435761 % 2**32:08x}" for k in range(26)) + "\n"
AVAZU_HEADER = ("id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,"
                "app_category,device_id,device_ip,device_model,device_type,device_conn_type,"
                "C14,C15,C16,C17,C18,C19,C20,C21\n")
AVAZU = ("12345678901234567890,0,14102100,1005,0,0000000a,0000000b,0000000c,0000000d,0000000e,"
         "0000000f,00000010,00000011,00000012,1,2,15706,320,50,1722,0,35,-1,79\n")
# recipe: (file name, its bytes, expected columns)
CASES: dict[str, tuple[str, bytes, dict[str, list[Any]]]] = {
    "criteo-kaggle": ("train.csv", b"Id,Label," + ",".join(
        [f"I{k}" for k in range(1, 14)] + [f"C{k}" for k in range(1, 27)]).encode()
        + b"\n10000000,1,1.0," + b"," * 11 + b"5," + b"68fd1e64," + b"," * 24 + b"\n",
        {"label": [1], "C1": [0x68fd1e64], "C26": [None], "I1": [np.float32(np.log(2))]}),
    "criteo-1tb": ("day_0.gz", gzip.compress((CRITEO * 2).encode()),
                   {"label": [1, 1], "C2": [2654435761] * 2}),
    "avazu": ("train.gz", gzip.compress((AVAZU_HEADER + AVAZU).encode()),
              {"click": [0], "site_id": [10], "device_model": [18], "C20": [None], "C21": [79]}),
    "movielens": ("ratings.csv", b"userId,movieId,rating,timestamp\n1,290000,4.0,964982703\n"
                                 b"2,1,3.5,964982704\n",
                  {"label": [1, 0], "user": [1, 2], "item": [290000, 1]}),
    "movietweetings": ("ratings.dat", b"1::0054890::9::1381945744\n2::1408101::2::1382400295\n",
                       {"label": [1, 0], "item": ["0054890", "1408101"]}),
    "book-crossing": ("BX-Book-Ratings.csv",
                      '"User-ID";"ISBN";"Book-Rating"\r\n"276725";"034545104X";"0"\r\n'
                      '"276726";"01550&amp;61224";"8"\r\n"3";"\\"x;y\\"";"9"\r\n"4";"M\xfcll";"5"\r\n'
                      .encode("latin-1"),
                      {"label": [1, 1, 0], "user": [276726, 3, 4],
                       "item": ["01550&amp;61224", '"x;y"', "M\xfcll"]}),
    "kuairec": ("small_matrix.csv",
                b"user_id,video_id,play_duration,video_duration,time,date,timestamp,watch_ratio\n"
                b"14,183,11635,6100,,,,2.907\n"
                b"14,148,4381,6067,2020-07-05 05:27:48.378,20200705.0,1593898068.378,0.722\n",
                {"label": [0], "video_id": [148], "timestamp": [1593898068]}),
    "kuairand": ("log_standard_4_08_to_4_21_pure.csv",
                 b"user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_rand,tab\n"
                 b"0,7,20220408,1300,1649397233000,1,0,0,1\n",
                 {"is_click": [1], "user_id": [0], "tab": [1], "is_rand": [0]}),
    "gowalla": ("loc-gowalla_totalCheckins.txt.gz", gzip.compress(
        b"0\t2010-10-19T23:55:27Z\t30.2359091167\t-97.7951395833\t22847\n"),
        {"user": [0], "place": [22847], "latitude": [np.float32(30.2359091167)]}),
    "citeulike": ("users.dat", b"2 17 3\n0\n3 3 5 6\n",
                  {"user": [0, 1, 2], "item": [[17, 3], [], [3, 5, 6]], "label": [1, 1, 1]}),
    "diginetica": ("train-item-views.csv", b"sessionId;userId;itemId;timeframe;eventdate\n"
                                           b"1;NA;81766;526309;2016-05-09\n1;7;31331;1;2016-05-10\n",
                   {"userId": [None, 7], "itemId": [81766, 31331]}),
    "retailrocket": ("events.csv", b"timestamp,visitorid,event,itemid,transactionid\n"
                                   b"1433221332117,257597,view,355908,\n"
                                   b"1433224214164,992329,transaction,248676,4000\n",
                     {"label": [0, 1], "visitorid": [257597, 992329]}),
    "yoochoose": ("yoochoose-clicks.dat", b"1,2014-04-07T10:51:09.277Z,214536502,0\n"
                                          b"1,2014-04-07T10:54:09.868Z,214536500,S\n",
                  {"item": [214536502, 214536500], "category": [None, "S"]}),
    "online-retail": ("online_retail.csv",
                      b"InvoiceNo,StockCode,Description,Quantity,InvoiceDate,UnitPrice,CustomerID,"
                      b'Country\nC536379,D,"Discount, ""x""",-1,2010-12-01 09:41:00,27.5,14527.0,UK'
                      b"\n536414,22139,,56,2010-12-01 11:52:00,0.0,,UK\n",
                      {"label": [0, 1], "StockCode": ["D", "22139"], "CustomerID": [14527, None],
                       "quantity": [0.0, np.float32(np.log(57))]}),
    "open-bandit": ("women.csv",
                    b",timestamp,item_id,position,click,propensity_score,user_feature_0,"
                    b"user_feature_1,user_feature_2,user_feature_3,x\n"
                    b"0,2019-11-24 00:01:29.788335+00:00,36,1,0,0.0217,81c,f1c,c2e,c39,0.0\n",
                    {"click": [0], "item_id": [36], "user_feature_3": ["c39"]}),
}


@pytest.mark.parametrize("name", CASES)
def test_genuine_rows(tmp_path: Path, name: str) -> None:
    file, data, expected = CASES[name]
    manifest, columns = read(tmp_path, name, {file: data})
    assert manifest["bad_rows"]["count"] == 0
    for column, values in expected.items():
        if isinstance(values[0], np.floating | float):
            np.testing.assert_allclose(columns[column], values, rtol=1e-6)
        else:
            assert columns[column] == values, column
    analyze_folder(tmp_path / "out")


@pytest.mark.parametrize("name", CASES)
def test_odd_but_genuine_files(tmp_path: Path, name: str) -> None:
    """Files with a byte order mark, CRLF, two gzip members, carriage returns, no last line feed."""
    file, data, _ = CASES[name]
    text = gzip.decompress(data) if file.endswith(".gz") else data
    (tmp_path / "plain").mkdir()
    manifest, columns = read(tmp_path / "plain", name, {file.removesuffix(".gz"): text})
    last = text.rstrip(b"\r\n").rpartition(b"\n")[2]
    # A lone CR is malformed. If fields may be quoted, it would make the whole file an error.
    odd = text.replace(b"\r\n", b"\n") + last[:5] + b"\r" * (name != "online-retail") + last[5:]
    odd = b"\xef\xbb\xbf" + odd.replace(b"\n", b"\r\n")
    packed = gzip.compress(odd[:9]) + gzip.compress(odd[9:])
    again, found = read(tmp_path, name, {file.removesuffix(".gz") + ".gz": packed},
                        replace(ONE_ID_EACH, max_bad=1))
    num_rows, num_bad = manifest["rows"]["train"], again["bad_rows"]["count"]
    assert again["rows"]["train"] == num_rows + 1 - num_bad
    names = {c for c in columns if c != manifest["columns"]["bucket"]}
    assert {c: found[c][:num_rows] for c in names} == {c: columns[c] for c in names}
    lines = text.count(b"\n") + 1
    assert all(f"row {lines}," in bad for bad in again["bad_rows"]["first"])
    assert num_bad == (name not in ("book-crossing", "citeulike", "online-retail"))


@pytest.mark.parametrize("data", [b"", gzip.compress(b""), b"\xef\xbb\xbf"],
                         ids=["nothing", "nothing, compressed", "byte order mark"])
@pytest.mark.parametrize("name", ["criteo-kaggle", "avazu", "citeulike"])
def test_files_without_any_text(tmp_path: Path, name: str, data: bytes) -> None:
    with pytest.raises(InvalidInputError, match="check for empty files"):
        read(tmp_path, name, {"log": data})


def test_a_file_without_valid_rows_among_valid_ones(tmp_path: Path) -> None:
    good = CASES["yoochoose"][1]
    manifest, columns = read(tmp_path, "yoochoose", {"a": b"\n", "b": good, "c": b""},
                             replace(ONE_ID_EACH, max_bad=1))
    assert manifest["rows"]["train"] == 2 and manifest["bad_rows"]["count"] == 1
    assert columns["item"] == [214536502, 214536500]


def test_one_bad_text_leaves_its_neighbours_in_a_parquet_file(tmp_path: Path) -> None:
    manifest = made(tmp_path, {"item": [b"a", b"b\0", b"c", b"d" * 1025, b"e"]}, Choice(["item"]),
                    valid="0", max_bad=2)
    assert manifest["rows"]["train"] == 3
    assert ["row 2" in b or "row 4" in b for b in manifest["bad_rows"]["first"]] == [True, True]


def test_every_data_set_has_a_recipe_a_card_and_a_test() -> None:
    names = {p.parent.name for p in datasets_root().glob("*/recipe.toml")}
    assert names == set(CASES) | {"amazon"}
    for name in names:
        card = (datasets_root() / name / "README.md").read_text()
        assert "| licence |" in card and f"oper preprocess {name}" in card


@pytest.mark.parametrize(("line", "item"), [
    (b"1\t290\t3\t881250949\n", 290), (b"1::3952::5::978300760\n", 3952)])
def test_movielens_forms_are_distinguished(tmp_path: Path, line: bytes, item: int) -> None:
    _, columns = read(tmp_path, "movielens", {"ratings": line})
    assert columns["item"] == [item]


def test_the_amazon_layout_must_be_requested(tmp_path: Path) -> None:
    line = {"ratings.csv": b"AKM1MP6P0OYPR,0132793040,5.0,1365811200\n"}
    with pytest.raises(InvalidInputError, match="--layout"):
        read(tmp_path, "amazon", line)
    for layout, user in (("2014", "AKM1MP6P0OYPR"), ("2018", "0132793040")):
        options = PreprocessOptions(valid="0", test="0", min_count=1, layout=layout, force=True)
        _, columns = read(tmp_path, "amazon", line, options)
        assert columns["user"] == [user] and columns["label"] == [1]
    reviews = b"".join(json.dumps({
        "reviewerID": f"A{k}", "asin": "0000031852", "helpful": [0, 1], "reviewText": 'a "b"\t',
        "overall": 3.0 + k, "unixReviewTime": 1370000000 + k}).encode() + b"\n" for k in range(2))
    options = PreprocessOptions(valid="0", test="0", min_count=1, max_bad=2, force=True)
    manifest, columns = read(tmp_path, "amazon", {
        "r.json.gz": gzip.compress(reviews + b'{"reviewerID": 5\n' + b"[]\n")}, options)
    assert columns["user"] == ["A0", "A1"] and columns["label"] == [0, 1]
    assert manifest["bad_rows"]["count"] == 2 and "row 3" in manifest["bad_rows"]["first"][0]
    with pytest.raises(FileFormatError, match=r"malformed rows=2, .*; correct the log, or raise"):
        read(tmp_path, "amazon", {"r.json": reviews + b'{"reviewerID": 5\n' + b"[]\n"},
             replace(options, max_bad=1))


@pytest.mark.parametrize("multi", [False, True])
def test_criteo_arrays_of_the_mlperf_chain(tmp_path: Path, multi: bool) -> None:
    rng = np.random.default_rng(0)
    dense = rng.random((50, 13), np.float32)
    labels = rng.integers(0, 2, (50, 1), np.int32)
    ids = [rng.integers(0, 9, (50, 1 + k % 3), np.int32) for k in range(26)]
    np.save(tmp_path / "day_0_dense.npy", dense)
    np.save(tmp_path / "day_0_labels.npy", labels)
    name = "day_0_sparse_multi_hot.npz" if multi else "day_0_sparse.npy"
    if multi:
        np.savez(tmp_path / name, **{str(k): v for k, v in enumerate(ids)})
    else:
        np.save(tmp_path / name, np.concatenate([v[:, :1] for v in ids], axis=1))
    manifest = preprocess(load_recipe("criteo-1tb"), [str(tmp_path / "day_*")], tmp_path / "out",
                          ONE_ID_EACH)
    table = decoded(tmp_path / "out")
    np.testing.assert_allclose(table["I13"], dense[:, 12])
    assert table["label"] == labels[:, 0].tolist()
    assert table["C3"] == (ids[2].tolist() if multi else ids[2][:, 0].tolist())
    assert manifest["columns"]["multi_hot"] == ([f"C{k + 1}" for k in range(26)] if multi else [])
    assert manifest["dense_transforms"]["I13"] == "none"
    stats = analyze_folder(tmp_path / "out")
    assert stats.tables["C3"].pooling_factor == (3 if multi else 1)
    (tmp_path / "day_0_labels.npy").unlink()
    with pytest.raises(InvalidInputError, match="day_0_labels"):
        preprocess(load_recipe("criteo-1tb"), [str(tmp_path / name)], tmp_path / "no")


def test_malformed_rows_of_arrays_are_named(tmp_path: Path) -> None:
    """The error states the column, the value found and the value expected."""
    dense, labels = np.ones((9, 13), np.float32), np.zeros((9, 1), np.float32)
    dense[2, 4], dense[5, 12], dense[7, 0] = np.nan, -np.inf, np.nan
    labels[3], labels[7] = 2, np.nan
    np.save(tmp_path / "day_0_dense.npy", dense)
    np.save(tmp_path / "day_0_labels.npy", labels)
    np.save(tmp_path / "day_0_sparse.npy", np.ones((9, 26), np.int32))
    log = [str(tmp_path / "day_0_sparse.npy")]
    manifest = preprocess(load_recipe("criteo-1tb"), log, tmp_path / "out",
                          replace(ONE_ID_EACH, max_bad=4))
    found = [text.partition(", ")[2] for text in manifest["bad_rows"]["first"]]
    assert found == ["row 3, column I5: 'nan', expected a finite number",
                     "row 4, column label: '2.0', expected 0 or 1",
                     "row 6, column I13: '-inf', expected a finite number",
                     "row 8, column label: 'nan', expected 0 or 1"]
    assert manifest["bad_rows"]["count"] == 4 and sum(manifest["rows"].values()) == 5
    with pytest.raises(FileFormatError, match=r"malformed rows=4, .*column I5: 'nan'"):
        preprocess(load_recipe("criteo-1tb"), log, tmp_path / "no", replace(ONE_ID_EACH, max_bad=3))


def test_the_recipe_csv(tmp_path: Path) -> None:
    recipe = generic_recipe("csv", Choice(["user", "tags:|"], "y", ["price"], "ts"))
    text = b"ts,user,tags,price,y,other\n100,u1,a|b,1.5,1,\n160,u2,,,0,\"x, y\"\n220,u1,b,2,1,z\n"
    manifest, columns = read(tmp_path, recipe, {"log.csv": text})
    assert columns["tags"] == [["a", "b"], [], ["b"]] and columns["user"] == ["u1", "u2", "u1"]
    assert columns["price"] == [1.5, 0, 2] and columns["label"] == [1, 0, 1]
    assert manifest["columns"]["multi_hot"] == ["tags"]
    table = analyze_folder(tmp_path / "out").tables["tags"]
    assert table.length_values.tolist() == [0, 1, 2] and table.num_accesses == 3
    with pytest.raises(FileFormatError, match="price2"):
        read(tmp_path, generic_recipe("csv", Choice(["user"], dense=["price2"])), {"b.csv": text},
             PreprocessOptions(force=True))


def test_parquet_folder_with_lists(tmp_path: Path) -> None:
    folder = tmp_path / "spark"
    folder.mkdir()
    (folder / "_SUCCESS").touch()
    for k in range(3):
        pq.write_table(pa.table({
            "clicked": [True, False], "user": pa.array([k, 10**18 + k], pa.uint64()),
            "items": pa.array([[k, 5], None], pa.list_(pa.int32())),
            "city": pa.array(["A", None]).dictionary_encode(), "score": [0.5, 1.5],
        }), folder / f"part-{k:05d}.parquet")
    recipe = generic_recipe("parquet", Choice(["user", "items", "city"], "clicked", ["score"]))
    manifest = preprocess(recipe, [str(folder)], tmp_path / "out", ONE_ID_EACH)
    assert manifest["rows"]["train"] == 6 and manifest["tables"]["user"]["num_distinct"] == 6
    table = pq.read_table(tmp_path / "out" / "train")
    assert [len(x) for x in table["items"].to_pylist()] == [2, 0] * 3
    assert table["label"].to_pylist() == [1, 0] * 3
    manifest = made(tmp_path, {"y": [0, 1, 7, None], "id": ["a", "b", "c", "d\0"]},
                    Choice(["id"], "y"), "bad", max_bad=2, valid="0")
    assert manifest["rows"]["train"] == 2
    assert [f"row {k}, column label" in line for k, line in zip(
        (3, 4), manifest["bad_rows"]["first"], strict=True)] == [True, True]


def test_values_in_parquet_lists_are_parsed(tmp_path: Path) -> None:
    lists = {"ages": pa.array([[9, 40], [18, -1]]), "codes": pa.array([["7", "08"], ["7", "x"]])}
    recipe = recipe_from_dict({"name": "log", "format": "parquet", "column": [
        {"name": "ages", "kind": "sparse", "parse": "bins", "bins": [18, 30], "missing": ["-1"]},
        {"name": "codes", "kind": "sparse", "parse": "int", "missing": ["x"]}]})
    made(tmp_path, lists, recipe, valid="0", min_count=1)
    columns = decoded(tmp_path / "out")
    assert columns["ages"] == [[0, 2], [1, None]] and columns["codes"] == [[7, 8], [7, None]]


def test_columns_of_categories(tmp_path: Path) -> None:
    """Texts that are dictionary-encoded, as pandas writes categories."""
    log = {n: pa.array(x).dictionary_encode() for n, x in {
        "click": ["0", "1", "1"], "price": ["1.5", "2", "4"], "user": ["17", "9", "100"]}.items()}
    choice = Choice(["user:int"], "click", ["price"], filter=["user >= 17"])
    made(tmp_path, log, choice, valid="0", min_count=1)
    columns = decoded(tmp_path / "out")
    assert columns["label"] == [0, 1] and columns["price"] == [1.5, 4]
    assert columns["user"] == [17, 100]


def test_lines_are_users_across_units_of_bags(tmp_path: Path) -> None:
    text = b"".join(b"2 %d %d\n" % (k, k + 1) for k in range(20))
    _, columns = read(tmp_path, "citeulike", {"users.dat": text}, replace(
        ONE_ID_EACH, unit_bytes=30))
    assert columns["user"] == list(range(20))
    (tmp_path / "more.dat").write_bytes(text)
    with pytest.raises(InvalidInputError, match=r"number the users=.*more\.dat.*the same numbers"):
        preprocess(load_recipe("citeulike"), [str(tmp_path / x) for x in ("users.dat", "more.dat")],
                   tmp_path / "both")


def test_views_and_lists_of_one_length(tmp_path: Path) -> None:
    """Arrow types that other programs write: string views and fixed-size lists."""
    made(tmp_path, {
        "y": [0, 1], "id": pa.array(["a", None], pa.string_view()),
        "code": pa.array([b"b", b"c"], pa.binary_view()),
        "tags": pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))},
        Choice(["id", "code", "tags"], "y"), valid="0", min_count=1)
    read_back = pq.read_schema(tmp_path / "log.parquet")
    assert [pa.types.is_string_view(read_back.field("id").type),
            pa.types.is_fixed_size_list(read_back.field("tags").type)] == [True, True]
    columns = decoded(tmp_path / "out")
    assert columns["id"] == ["a", None] and columns["code"] == ["b", "c"]
    assert columns["tags"] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("column", [
    pa.array([1, 2], pa.timestamp("us")), pa.array([{"a": 1}] * 2), pa.array([[[1]]] * 2)])
def test_unsupported_types_of_ids_are_refused(tmp_path: Path, column: pa.Array) -> None:
    with pytest.raises(InvalidInputError, match="type of the id column 'id'"):
        made(tmp_path, {"y": [0, 1], "id": column}, Choice(["id"], "y"))


@pytest.mark.parametrize("raw", [False, True])
def test_a_column_without_values_in_one_file(tmp_path: Path, raw: bool) -> None:
    """In a file without a value, the column has Arrow's null type."""
    columns = {"0": ([None] * 4, [[], None] * 2), "1": ([5, 6, 5, None], [[1], [2]] * 2)}
    for name, (ids, tags) in columns.items():
        pq.write_table(pa.table({"y": [0, 1] * 2, "id": ids, "tags": tags}),
                       tmp_path / f"{name}.parquet")
    assert pq.read_schema(tmp_path / "0.parquet").field("id").type == pa.null()
    recipe = generic_recipe("parquet", Choice(["id", "tags"], "y"))
    manifest = preprocess(recipe, [str(tmp_path / "*.parquet")], tmp_path / "out",
                          PreprocessOptions(valid="0", raw_ids=raw, min_count=None if raw else 1))
    table = pq.read_table(tmp_path / "out" / "train")
    missing = manifest["tables"]["id"]["missing_id"]
    found = table["id"].to_pylist()
    assert [x == missing for x in found] == [True] * 4 + [False, False, False, True]
    assert found[4] == found[6] != found[5] and [len(x) for x in table["tags"].to_pylist()] == (
        [0] * 4 + [1] * 4)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(("ids", "more", "types"), [
    (["1", "2"], [1, 2], "'strings': .*a.parquet', 'signed integers': "),
    ([1, 2], pa.array([1, 2], pa.uint64()), "'signed integers': .*'unsigned integers': "),
    ([[1], [2]], [1, 2], "'lists': .*'one id per row': ")])
def test_files_of_other_types_are_refused(tmp_path: Path, ids: Any, more: Any, types: str,
                                          raw: bool) -> None:
    """Otherwise equal values could get different ids, or only some rows would be lists."""
    for name, column in (("a", ids), ("b", more)):
        pq.write_table(pa.table({"y": [0, 1], "id": column}), tmp_path / f"{name}.parquet")
    with pytest.raises(InvalidInputError, match=f"types of column 'id'={{{types}"):
        preprocess(generic_recipe("parquet", Choice(["id"], "y")), [str(tmp_path)],
                   tmp_path.parent / f"{tmp_path.name}.out", PreprocessOptions(raw_ids=raw))


def of_real_data(recipe: str, log: str, out: Path) -> dict[str, Any]:
    """Preprocess a log of real data; return the manifest."""
    return preprocess(load_recipe(recipe), [str(real_data(log))], out, ONE_ID_EACH)


def test_facts_of_online_retail(tmp_path: Path) -> None:
    manifest = of_real_data("online-retail", "online_retail/online_retail.csv.gz", tmp_path / "out")
    assert manifest["rows"]["train"] == 541_909 and manifest["bad_rows"]["count"] == 0
    tables = manifest["tables"]
    assert tables["StockCode"]["num_distinct"] == 4070
    assert tables["CustomerID"]["num_distinct"] == 4372 + 1  # with the missing customer
    labels = pq.read_table(tmp_path / "out" / "train", columns=["label"])["label"].to_numpy()
    assert int((labels == 0).sum()) == 10_624


def test_facts_of_movietweetings_and_open_bandit(tmp_path: Path) -> None:
    manifest = of_real_data("movietweetings", "movietweetings_142k/ratings.dat.gz", tmp_path / "a")
    assert manifest["rows"]["train"] == 141_695
    assert [manifest["tables"][n]["num_distinct"] for n in ("user", "item")] == [21_081, 12_611]
    manifest = of_real_data("open-bandit", "open_bandit/random/women/women.csv.gz", tmp_path / "b")
    assert manifest["rows"]["train"] == 10_000
    assert manifest["tables"]["item_id"]["num_distinct"] == 46
    table = pq.read_table(tmp_path / "b" / "train", columns=["propensity_score", "click"])
    np.testing.assert_allclose(table["propensity_score"].to_numpy(), 1 / 46, rtol=1e-6)
    assert table["click"].to_numpy().mean() == pytest.approx(0.0046)
    assert Folder.open(tmp_path / "b").bucket_labels[0] == "part 0"


def test_facts_of_the_24_day_log(tmp_path: Path) -> None:
    manifest = of_real_data("criteo-1tb", "criteo_1tb_day0_10k/day_0.gz", tmp_path / "out")
    labels = pq.read_table(tmp_path / "out" / "train", columns=["label"])["label"].to_numpy()
    assert labels.size == 10_000 and labels.mean() == 0.0265
    distinct = [2755, 1796, 2704, 724, 1452, 3, 1934, 518, 20, 2550, 1451, 3019, 9, 355, 1127, 29,
                3, 166, 12, 2799, 2088, 2692, 1260, 2136, 29, 24]
    tables = list(manifest["tables"].values())
    assert [t["num_distinct"] - (t["missing_id"] > 0) for t in tables] == distinct


def test_reviews_of_2023_as_json(tmp_path: Path) -> None:
    line = {"rating": 5.0, "title": "t", "images": [], "asin": "a", "parent_asin": "p",
            "user_id": "u", "timestamp": 1588687728923, "helpful_vote": 0}
    old = {"reviewerID": "u", "asin": "p", "overall": 2.0, "unixReviewTime": 1588687728}
    for name, entry, label in (("new", line, 1), ("old", old, 0)):
        (tmp_path / name).mkdir()
        _, columns = read(tmp_path / name, "amazon", {
            "r.jsonl": json.dumps(entry).encode() + b"\n"})
        assert columns["label"] == [label] and columns["item"] == ["p"]
        assert columns["time"] == [1588687728]


def test_integers_of_64_bits_in_json(tmp_path: Path) -> None:
    """Integers are not rounded to float64, and several ids in one field are read."""
    recipe = recipe_from_dict({"name": "own", "format": "jsonl", "column": [
        {"name": "id", "kind": "sparse", "parse": "int"},
        {"name": "site", "kind": "sparse", "parse": "uint64"},
        {"name": "tags", "kind": "sparse", "parse": "int", "multi": "|"}]})
    ids = [(1 << 53) + 1, 1 << 53, -(1 << 63), (1 << 63) - 1, None, 17]
    sites = [(1 << 64) - 1, (1 << 64) - 2, 0, 1, None, 3]
    lines = [{"id": a, "site": b, "tags": "7|8" if a == 17 else ""}
             for a, b in zip(ids, sites, strict=True)]
    _, columns = read(tmp_path, recipe, {
        "log.jsonl": "".join(f"{json.dumps(x)}\n" for x in lines).encode()})
    assert columns["id"] == ids and columns["site"] == sites
    assert columns["tags"] == [[]] * 5 + [[7, 8]]


def test_alternative_names_of_json_fields(tmp_path: Path) -> None:
    recipe = recipe_from_dict({"name": "log", "format": "jsonl", "column": [
        {"name": "user", "kind": "sparse", "parse": "string", "source": ["user_id", "uid"]}]})
    for name, text in (("a", b'{"uid": "x"}\n'), ("b", b'{"user_id": "y"}\n{"uid": "x"}\n')):
        (tmp_path / name).mkdir()
        _, columns = read(tmp_path / name, recipe, {"log": text})
        assert columns["user"] == ["y", "x"][-len(columns["user"]):]


def test_text_is_filtered(tmp_path: Path) -> None:
    text = b"user,price,country,y\n" + b"".join(
        f"u{k % 3},{'' if k % 5 == 0 else k},{'de' if k % 2 else 'fr'},{k % 2}\n".encode()
        for k in range(40))
    for bad, max_bad in ((b"", 0), (b"u0,10,de,x\nu0,1,de,x\n,,fr,\n", 1)):
        recipe = generic_recipe("csv", Choice(["user"], "y", filter=[
            "country == de", "price >= 9"]))
        folder = tmp_path / str(max_bad)
        folder.mkdir()
        manifest, columns = read(folder, recipe, {"a.csv": text + bad}, replace(
            ONE_ID_EACH, max_bad=max_bad))
        kept = [k for k in range(40) if k % 5 and k % 2 and k >= 9]
        assert columns["user"] == [f"u{k % 3}" for k in kept]
        assert manifest["bad_rows"]["count"] == max_bad and manifest["rows"]["train"] == len(kept)


AGES = ["9", "18", "100", "NA", "5", "25"]  # NA = missing


@pytest.mark.parametrize("filter, kept", [
    ("age >= 18", ["18", "100", "25"]), ("age < 20", ["9", "18", "5"]),
    ("age != 5", ["9", "18", "100", "25"])])
@pytest.mark.parametrize("form", ["text", "irregular", "strings", "parquet"])
def test_filters_of_numbers_with_missing_fields(
        tmp_path: Path, form: str, filter: str, kept: list[str]) -> None:
    users = [f"u{age}" for age in AGES]
    age = {"name": "age", "kind": "dense", "parse": "float", "missing": ["NA"]}
    if form == "strings":
        age |= {"kind": "sparse", "parse": "string"}
    value = {"name": "log", "filter": [filter], "column": [
        {"name": "user", "kind": "sparse", "parse": "string"}, age]}
    data = "user,age\n" + "".join(f"{u},{a}\n" for u, a in zip(users, AGES, strict=True))
    bad = int(form == "irregular")
    if form == "parquet":
        pq.write_table(pa.table({"user": users, "age": AGES}), tmp_path / "log")
        value |= {"format": "parquet"}
    else:
        (tmp_path / "log").write_text(data + "x,1,2\n" * bad)
        value |= {"separator": ",", "header": True}
    _, columns = read(tmp_path, recipe_from_dict(value), {
        "log": (tmp_path / "log").read_bytes()}, replace(ONE_ID_EACH, max_bad=bad))
    assert columns["user"] == [f"u{age}" for age in kept]


def test_text_that_is_no_number_is_not_compared_with_a_number(tmp_path: Path) -> None:
    recipe = generic_recipe("csv", Choice(["user"], filter=["user >= 18"]))
    with pytest.raises(InvalidInputError, match="cannot filter"):
        read(tmp_path, recipe, {"log": b"user\n9\nnone\n"})
    _, columns = read(tmp_path, recipe, {"log": b"user\n9\n100\n18\n"})
    assert columns["user"] == ["100", "18"]


def test_missing_fields_of_parquet_and_json(tmp_path: Path) -> None:
    columns = {"text": ["a", "NA", "b", "NA", ""], "number": [1, -1, 3, -1, 4],
               "real": [0.5, -0.1, 2.5, -0.1, 3.0], "big": [2**63 + 1, 0, 2**63, 0, 5]}
    value = {"name": "log", "column": [
        {"name": "text", "kind": "sparse", "parse": "string", "missing": ["NA"]},
        {"name": "number", "kind": "sparse", "parse": "int", "missing": ["-1", "none"]},
        {"name": "big", "kind": "sparse", "parse": "uint64", "missing": ["0", "-1"]},
        {"name": "real", "kind": "dense", "parse": "float", "missing": ["-0.1"]}]}
    table = pa.table({**columns, "big": pa.array(columns["big"], pa.uint64())})
    coded = table.set_column(0, "text", table.column("text").dictionary_encode())
    expected = {"text": ["a", None, "b", None, None], "number": [1, None, 3, None, 4],
                "big": [2**63 + 1, None, 2**63, None, 5], "real": [0.5, 0.0, 2.5, 0.0, 3.0]}
    # Arrow does not compare numbers of 16 bits.
    half = table.set_column(2, "real", pa.array(np.array(columns["real"], np.float16)))
    for name, log in (("plain", table), ("coded", coded), ("half", half), ("json", None)):
        folder = tmp_path / name
        folder.mkdir()
        if log is None:
            text = "".join(json.dumps({n: x[k] for n, x in columns.items()}) + "\n"
                           for k in range(5))
            (folder / "log").write_text(text)
        else:
            pq.write_table(log, folder / "log")
        form = {"format": "jsonl" if log is None else "parquet"}
        _, found = read(folder, recipe_from_dict(value | form), {
            "log": (folder / "log").read_bytes()})
        assert {n: found[n] for n in expected} == expected


def test_a_workbook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    from datetime import datetime

    book = openpyxl.Workbook()
    for row in (["InvoiceNo", "StockCode", "Description", "Quantity", "InvoiceDate", "UnitPrice",
                 "CustomerID", "Country"],
                [536365, "85123A", 'a "b", c', 6, datetime(2010, 12, 1, 8, 26), 2.55, 17850, "UK"],
                ["C536379", "D", None, -1, datetime(2010, 12, 1, 9, 41), 27.5, None, "UK"]):
        book.active.append(row)
    # Programs that write rows one by one do not know the sheet's dimensions.
    monkeypatch.setattr(type(book.active), "calculate_dimension", lambda _: "A1")
    book.save(tmp_path / "retail.xlsx")
    preprocess(load_recipe("online-retail"), [str(tmp_path / "retail.xlsx")], tmp_path / "out",
               ONE_ID_EACH)
    found = pq.read_table(tmp_path / "out" / "train").to_pydict()
    assert found["label"] == [1, 0] and found["time"] == [1291191960, 1291196460]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "retail.xlsx"]
