from __future__ import annotations

import datetime

import pytest

from tinsmith.client.tokenization import chat_template
from tinsmith.client.tokenization.chat_template import choose, render
from tinsmith.errors import ValidationError

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "well  "}
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
TRIMMING = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}<end>{% endfor %}"


def test_s42_blocks_leave_no_white_space_behind() -> None:
    template = "a\n   {% if true %}\nb\n   {% endif %}\nc"

    assert render(template, [USER]) == "a\nb\nc"


def test_s42_json_is_neither_escaped_nor_sorted() -> None:
    template = "{{ tools | tojson }}|{{ tools[0] | tojson(indent=1) }}"

    text = render(template, [USER], tools=[{"z": "<ü>", "a": 1}])

    assert text == '[{"z": "<ü>", "a": 1}]|{\n "z": "<ü>",\n "a": 1\n}'


def test_a_template_may_reject_a_conversation() -> None:
    with pytest.raises(ValidationError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", [USER])


def test_an_invalid_template_is_reported() -> None:
    with pytest.raises(ValidationError, match="chat template"):
        render("{% if %}", [USER])


def test_a_message_reaches_the_template_unchanged() -> None:
    message = {"role": "assistant", "thinking": "hm", "content": None}

    assert render("{{ messages[0] | tojson }}", [message]) == (
        '{"role": "assistant", "thinking": "hm", "content": null}'
    )


def test_templates_can_use_the_current_date() -> None:
    today = datetime.datetime.now().astimezone()

    assert render("{{ strftime_now('%Y') }}", [USER]) in {str(today.year), str(today.year + 1)}


def test_loop_controls_and_generation_blocks_are_supported() -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{% set x = 1 %}{{ m.content }}{% endgeneration %}{{ x }}{% endfor %}"
    )

    assert render(template, [USER, ASSISTANT]) == "hi"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ range(10000000) | list }}",
    ],
)
def test_templates_run_in_a_sandbox(template: str) -> None:
    messages = [dict(USER)]
    try:
        text = render(template, messages)
    except (ValidationError, OverflowError):
        text = ""

    assert "class" not in text
    assert messages == [USER]


def test_arbitrary_objects_do_not_reach_a_template() -> None:
    with pytest.raises(ValidationError, match=r"tools.*JSON schemas"):
        render(PLAIN, [USER], tools=[print])


@pytest.mark.parametrize(
    ("template", "expected"),
    [(PLAIN, "[user]hi<end>[assistant]well  "), (TRIMMING, "[user]hi<end>[assistant]well")],
)
def test_a_final_message_can_be_left_open(template: str, expected: str) -> None:
    messages = [USER, ASSISTANT]

    assert render(template, messages, continue_final_message=True) == expected
    assert messages == [USER, ASSISTANT]


def test_blocks_of_text_and_other_fields_can_be_continued() -> None:
    blocks = {"role": "assistant", "content": [{"type": "text", "text": "so"}, {"type": "image"}]}

    template = "{{ messages[-1].content[0].text }}<end>"
    assert render(template, [blocks], continue_final_message=True) == "so"

    thinking = {"role": "assistant", "reasoning_content": "hm", "content": None}
    template = "<think>{{ messages[-1].reasoning_content }}</think>"
    text = render(template, [thinking], continue_final_message="reasoning_content")
    assert text == "<think>hm"


@pytest.mark.parametrize(
    ("template", "message", "match"),
    [("nothing", ASSISTANT, "leaves"), (PLAIN, {"role": "a", "content": None}, "no text")],
)
def test_a_message_that_cannot_be_continued_is_rejected(
    template: str, message: dict[str, str | None], match: str
) -> None:
    with pytest.raises(ValidationError, match=match):
        render(template, [message], continue_final_message=True)


def test_continue_final_message_and_add_generation_prompt_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match="cannot be combined"):
        render(PLAIN, [USER], continue_final_message=True, add_generation_prompt=True)


def test_a_template_is_compiled_once() -> None:
    template = PLAIN + "{# compiled once #}"
    before = chat_template.compiled.cache_info().misses
    for _ in range(5):
        render(template, [USER])

    assert chat_template.compiled.cache_info().misses == before + 1


def test_the_tool_template_is_used_if_there_is_one() -> None:
    several = {"default": "d", "tool_use": "t", "rag": "r"}

    assert choose(several, None, has_tools=False) == "d"
    assert choose(several, None, has_tools=True) == "t"
    assert choose(several, "rag", has_tools=True) == "r"
    assert choose("one", None, has_tools=True) == "one"
    assert choose("one", "{{ another }}", has_tools=False) == "{{ another }}"


@pytest.mark.parametrize("template", [None, {"rag": "r"}])
def test_a_missing_template_is_reported_with_a_remedy(template: dict[str, str] | None) -> None:
    with pytest.raises(ValidationError, match=r"no chat template; set tokenizer\.chat_template"):
        choose(template, None, has_tools=False)
