"""The server's page in a real browser: type, stream, move the slider, see tokens per forward change."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_client import Running, eventually
from transformers import Qwen2Config, Qwen2ForCausalLM

from marsbench.training.tokenizer import build_tokenizer

PAGE = Path(__file__).resolve().parent.parent / "marsbench" / "serving" / "page.html"


def test_the_page_is_whole_in_itself() -> None:
    """Guards against a page that stays empty without a network."""
    text = PAGE.read_text(encoding="utf-8")
    assert not re.findall(r"(?:src|href)=\"(?!data:)|url\(|@import|https?://", text)
    labelled = set(re.findall(r"for=\"([\w-]+)\"", text))
    fields = set(re.findall(r"<(?:textarea|input)[^>]* id=\"([\w-]+)\"", text))
    assert fields - labelled == {"limit"}, "a field that no label names; this one stands inside its label"


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights that decodes slowly, and never ends an answer by itself."""
    folder = tmp_path_factory.mktemp("slow")
    tokenizer = build_tokenizer(512, texts=200)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.1, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(browser: Any, slow: Path) -> Iterator[Running]:
    """A server of the slow checkpoint; without a browser it is not started."""
    running = Running(slow, "--threshold", "1")
    yield running
    running.end()


def value(browser: Any, name: str) -> str:
    return str(browser.find_element("id", name).text)


def test_the_slider_turns_what_streams(browser: Any, server: Running) -> None:
    """Guards against a page that shows no text, shades nothing, or whose slider turns nothing; by keyboard alone."""
    from selenium.webdriver.common.keys import Keys

    browser.get(server.url)
    assert eventually(lambda: value(browser, "health") == "ready")
    assert value(browser, "model") == "micro"
    browser.execute_script("document.getElementById('limit').value = 2000")
    browser.switch_to.active_element.send_keys("Tom has 3 apples.", Keys.ENTER)
    slider = browser.find_element("id", "tau")
    assert eventually(lambda: value(browser, "per-forward") == "1.00")
    slider.send_keys(Keys.HOME)
    assert eventually(lambda: float(value(browser, "per-forward")) > 1.5), value(browser, "per-forward")
    assert eventually(lambda: not browser.find_element("id", "stop").is_enabled(), 60)
    spans = browser.find_elements("css selector", "#log .assistant span")
    assert {"f0", "f1"} == {span.get_attribute("class") for span in spans[:8]}
    assert "4 tokens in one forward pass" in [span.get_attribute("title") for span in spans]
    cost = browser.find_element("css selector", "#log .cost").text
    assert "tau 0.00 to 1.00" in cost and "mars" in cost
    assert eventually(lambda: browser.find_element("id", "tau-line").get_attribute("points"))
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_escape_stops_an_answer_and_errors_are_shown(browser: Any, server: Running) -> None:
    """Guards against an answer that cannot be stopped, and a refusal that the page does not show."""
    from selenium.webdriver.common.keys import Keys

    prompt = browser.find_element("id", "prompt")
    browser.find_element("id", "clear").click()
    server.call("/v1/speed", {"threshold": 1.0}, "PUT")
    prompt.send_keys("Go on", Keys.ENTER)
    assert eventually(lambda: browser.find_elements("css selector", "#log .assistant span"))
    prompt.send_keys(Keys.ESCAPE)
    assert eventually(lambda: not browser.find_element("id", "stop").is_enabled())
    assert eventually(server.is_empty)
    browser.execute_script("document.getElementById('limit').value = 99999")
    prompt.send_keys("Too much", Keys.ENTER)
    assert eventually(lambda: "context" in "".join(
        line.text for line in browser.find_elements("css selector", "#log .error")
    ))  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_can_be_read(browser: Any, scheme: str) -> None:
    """Guards against dark text on a dark ground: contrast of text by WCAG's formula, in both schemes."""
    browser.get(PAGE.as_uri())
    can_be_read(browser, scheme, ("ink", "even"), ("ink", "odd"), ("on-accent", "accent"))


def can_be_read(browser: Any, scheme: str, *more: tuple[str, str]) -> dict[str, str]:
    """Check a page's inks on their grounds in one scheme; returns the colours by their names."""
    wanted = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
    pairs = [("ink", "page"), ("ink", "field"), ("quiet", "page"), ("quiet", "field"), ("second", "field"), *more]
    colours: dict[str, str] = browser.execute_script("""
      const style = getComputedStyle(document.documentElement), probe = document.createElement("i");
      document.body.append(probe);
      return Object.fromEntries(arguments[0].map(
        name => [name, (probe.style.color = style.getPropertyValue("--" + name), getComputedStyle(probe).color)]));
    """, sorted({*sum(pairs, ())}))  # fmt: skip
    for ink, ground in pairs:
        assert contrast(colours[ink], colours[ground]) >= 4.5, (scheme, ink, ground)
    return colours


def contrast(first: str, second: str) -> float:
    """The contrast of two colours, from 1 to 21."""
    high, low = sorted((luminance(colour) for colour in (first, second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
