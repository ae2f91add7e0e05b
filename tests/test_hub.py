"""A Hub that takes connections and never answers is asked once; then the local cache alone is searched."""

import socket
import threading

import datasets
import pytest
from huggingface_hub import constants

from octavo import hub
from octavo.config.data import DataConfig
from octavo.data import tokenizer
from octavo.data.corpus import Corpus
from octavo.errors import InputError
from octavo.models.sources import load_config, weights_folder

ANSWER = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


@pytest.fixture
def asked(request, monkeypatch, tmp_path):
    """The connections that a Hub has got, which gives the parameter as its answer; the limit is a second."""
    connections = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # closed
                    return
                connections.append(connection)
                connection.sendall(request.param)

        threading.Thread(target=accept, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", constants.ENDPOINT)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, "127.0.0.1")
        monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "1")
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
        for module in (constants, datasets.config):
            monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
        hub._answers.cache_clear()
        yield connections
        hub._answers.cache_clear()
        server.shutdown(socket.SHUT_RDWR)
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("asked", [b""], indirect=True)
def test_a_hub_without_answers_is_asked_once_for_all_names(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = DataConfig(source="owner/texts", sequence_length=8, folder=str(tmp_path / "data"))
    for look_up, words in (
        (lambda: load_config("owner/model"), "model.source = 'owner/model' .* cannot be reached .*`hf download owner/model`"),
        (lambda: weights_folder("owner/model"), "'owner/model': the weights could not be fetched.*hf download owner/model"),
        (lambda: tokenizer.load("owner/tok"), "data.tokenizer = 'owner/tok' .* cannot be reached .*`hf download owner/tok`"),
        (lambda: list(Corpus(section)), "data.source = 'owner/texts' .* cannot be reached .*--repo-type dataset owner/texts`"),
    ):
        with pytest.raises(InputError, match=words):
            look_up()
    assert 1 <= len(asked) <= 2  # a second time if a minute ended in between
    assert (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE) == (False, False)


@pytest.mark.parametrize("asked", [ANSWER], indirect=True)
def test_a_hub_with_any_answer_is_looked_up(asked):
    with hub.bounded():
        assert constants.HF_HUB_OFFLINE is False
    assert len(asked) == 1


@pytest.mark.parametrize("asked", [ANSWER], indirect=True)
def test_offline_nothing_is_asked(asked, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with hub.bounded():
        assert constants.HF_HUB_OFFLINE is True
    assert asked == []
    assert constants.HF_HUB_OFFLINE is True
