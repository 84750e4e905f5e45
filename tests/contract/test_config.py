"""The configuration loader: four sources, one order, and no silence about what it does not know."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwire.config import ConfigError, WireConfig, effective, load, setting


class Mode(enum.Enum):
    FAST = "fast"
    SAFE = "safe"


@dataclass(frozen=True)
class Example(WireConfig):
    """An example."""

    model: str = setting(help="the model")
    pages: int = setting(100, help="pages", minimum=1, maximum=1000)
    ratio: float = setting(0.5, help="a share", minimum=0.0, maximum=1.0)
    folder: Path | None = setting(None, help="a folder")
    names: tuple[str, ...] = setting((), help="names")
    kind: Literal["a", "b"] = setting("a", help="a kind")
    mode: Mode = setting(Mode.FAST, help="a mode")
    eager: bool = setting(True, help="be eager")
    key: str | None = setting(None, help="a key", secret=True)

    def check(self) -> None:
        if self.pages == 13:
            raise ConfigError("--pages", self.pages, "no unlucky number")


def read(*argv: str, prog: str = "draftwire-verifier", **env: str) -> Example:
    return load(Example, argv, env, prog)


def refused(*argv: str, **env: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read(*argv, **env)
    return caught.value


def test_flag_beats_variable_beats_file_beats_default(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text('model = "f"\npages = 2\nratio = 0.25\n"log-level" = "debug"\nkind = "b"\n')
    config = read("--config", str(file), "--pages=4", DRAFTWIRE_PAGES="3", DRAFTWIRE_RATIO="0.75")
    assert (config.model, config.pages, config.ratio) == ("f", 4, 0.75)
    assert (config.kind, config.log_level, config.keepalive_s) == ("b", "debug", 60.0)


def test_every_type_is_read():
    config = read(
        "--model", "m", "--folder", "/a/b", "--names", "x,y", "--names", "z", "--kind", "b",
        "--mode", "safe", "--no-eager", "--key=-secret-", "--ratio", "1e-1",
    )  # fmt: skip
    assert config.folder == Path("/a/b")
    assert config.names == ("x", "y", "z")
    assert (config.kind, config.mode, config.eager) == ("b", Mode.SAFE, False)
    assert (config.key, config.ratio) == ("-secret-", 0.1)


def test_a_scoped_variable_is_for_one_command_only():
    env = {
        "DRAFTWIRE_MODEL": "both",
        "DRAFTWIRE_VERIFIER__MODEL": "mine",
        "DRAFTWIRE_DRAFTER__WHATEVER": "theirs",
    }
    assert read(**env).model == "mine"
    with pytest.raises(ConfigError, match="DRAFTWIRE_DRAFTER__WHATEVER"):
        read(prog="draftwire-drafter", **env)


@pytest.mark.parametrize(
    ("argv", "env", "field", "limit"),
    [
        (["--modle", "m"], {}, "flag", "known flag"),
        (["m"], {}, "argument", "a flag"),
        (["--model"], {}, "--model", "followed by a value"),
        (["--model", "m", "--model", "n"], {}, "--model", "given once"),
        (["--no-model"], {}, "flag", "known flag"),
        ([], {}, "--model", "DRAFTWIRE_MODEL"),
        (["--model", "m"], {"DRAFTWIRE_MODLE": "m"}, "variable", "a setting of"),
        (["--model", "m"], {"DRAFTWIRE_model": "m"}, "variable", "a setting of"),
        (["--model", "m"], {"DRAFTWIRE_VERIFIR__PAGES": "1"}, "variable", "scoped to one of"),
        (["--model", "m", "--pages", "0"], {}, "--pages", "at least 1"),
        (["--model", "m", "--pages", "1001"], {}, "--pages", "at most 1000"),
        (["--model", "m", "--pages", "1.5"], {}, "--pages", "an integer"),
        (["--model", "m", "--pages", "١"], {}, "--pages", "an integer"),
        (["--model", "m", "--pages", "13"], {}, "--pages", "unlucky"),
        (["--model", "m", "--ratio", "nan"], {}, "--ratio", "finite"),
        (["--model", "m", "--ratio", "much"], {}, "--ratio", "a number"),
        (["--model", "m", "--kind", "c"], {}, "--kind", "one of a, b"),
        (["--model", "m", "--mode", "FAST"], {}, "--mode", "one of fast, safe"),
        (["--model", "m", "--eager=maybe"], {}, "--eager", "true or false"),
        (["--model", ""], {}, "--model", "text"),
        (["--model", "a\0b"], {}, "--model", "NUL"),
        (["--model", "m"], {"DRAFTWIRE_PAGES": "many"}, "DRAFTWIRE_PAGES", "an integer"),
        (["--model", "m", "--tls-cert", "c.pem"], {}, "--tls-key", "together"),
        (["--model", "m", "--tls-client-ca", "c.pem"], {}, "--tls-client-ca", "--tls-cert"),
        (["--model", "m", "--listen", "0.0.0.0:1"], {}, "--listen", "loopback"),
        (["--model", "m", "--listen", "nonsense"], {}, "--listen", "host:port or unix:PATH"),
        (["--model", "m", "--listen", "unix:"], {}, "--listen", "host:port or unix:PATH"),
        (["--model", "m", "--listen", "127.0.0.1:1,127.0.0.1:2"], {}, "--listen", "host:port"),
        (["--model", "m", "--listen", "dns:///localhost:1"], {}, "--listen", "host:port"),
        (
            ["--model", "m", "--listen", "0.0.0.0:1", "--allow-insecure", "--token-file", "t"],
            {},
            "--token-file",
            "TLS",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(argv, env, field, limit):
    error = refused(*argv, **env)
    assert error.field == field
    assert limit in error.limit
    assert error.field in str(error)
    assert error.limit in str(error)


@pytest.mark.parametrize(
    "text",
    ["model = ", "modle = 'm'", "model = ['m']", "model='m'\npages = true", "model='m'\neager = 1",
     "model='m'\nnames = [1]", "model='m'\n[pages]\na = 1", "model='m'\npages = 1.0"],
)  # fmt: skip
def test_a_file_that_is_not_understood_is_refused(tmp_path, text):
    file = tmp_path / "settings.toml"
    file.write_text(text)
    refused("--config", str(file))
    refused("--config", str(tmp_path / "missing.toml"))


def test_secrets_are_never_shown(capsys):
    config = read("--model", "m", "--key", "hush")
    shown = effective(config)
    assert shown["key"] == "***"
    assert shown["names"] == ""
    assert shown["eager"] == "true"
    assert set(shown) >= {"model", "listen", "drain-grace-s", "max-message-bytes"}
    assert "hush" not in str(shown)


def test_help_lists_every_setting_with_its_default(capsys):
    with pytest.raises(SystemExit) as left:
        read("--help")
    assert left.value.code == 0
    text = capsys.readouterr().out
    for word in ("--pages", "at least 1; at most 1000; default: 100", "--no-eager", "required"):
        assert word in text


@given(argv=st.lists(st.text()), env=st.dictionaries(st.text(), st.text()))
def test_no_input_makes_anything_but_a_config_or_a_config_error(argv, env):
    env = {f"DRAFTWIRE_{name}": value for name, value in env.items()}
    try:
        config = load(Example, [word for word in argv if word != "-h"], env, "draftwire-verifier")
    except ConfigError as error:
        refused = str(error)
    except SystemExit:
        refused = "help" if "--help" in argv else ""
    else:
        refused = config.model
    assert refused


@given(
    pages=st.integers(1, 1000).filter(lambda n: n != 13),
    ratio=st.floats(0, 1),
    eager=st.booleans(),
    names=st.lists(st.text("abc-_.", min_size=1)),
)
def test_what_effective_shows_loads_to_the_same(pages, ratio, eager, names):
    config = Example(
        model="m", pages=pages, ratio=ratio, eager=eager, names=tuple(names), mode=Mode.SAFE
    )
    flags = [f"--{name}={value}" for name, value in effective(config).items() if value]
    assert load(Example, flags, {}, "draftwire-verifier") == config


@pytest.mark.parametrize(
    "flags",
    [
        ("--config", "a.toml", "--config", "b.toml"),
        ("--allow-insecure", "--no-allow-insecure"),
        ("--allow-insecure", "--allow-insecure"),
        ("--allow-insecure", "--allow-insecure=false"),
        ("--max-message-bytes", "70000", "--max_message_bytes=80000"),
    ],
)
def test_of_two_values_none_is_passed_over(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="given once"):
        load(WireConfig, flags, {}, "draftwire-test")


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("max-message-bytes = 70000\nmax_message_bytes = 80000", "given once"),
        ("listen = " + "[" * 5000, "readable TOML"),
        ("max_message_bytes = " + "9" * 5000, "readable TOML"),
    ],
    ids=["two spellings", "deep", "long"],
)
def test_a_file_that_says_it_twice_or_cannot_be_read_is_refused(
    tmp_path: Path, text: str, limit: str
) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=limit):
        load(WireConfig, ["--config", str(path)], {}, "draftwire-test")
