"""Chat templates: what transformers renders, errors in the template's own words, and a sandbox with a budget."""

import datetime as dt
import threading
import time

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from segue_model.chat import ChatTemplate, ChatTemplateError
from segue_model.chat_sandbox import MAX_CHARACTERS

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = """
{%- if messages[0]['role'] == 'system' %}
    {%- set loop_messages = messages[1:] %}
    {%- set system = '<<SYS>>\n' ~ messages[0]['content'] ~ '\n<</SYS>>\n\n' %}
{%- else %}
    {%- set loop_messages = messages %}
    {%- set system = '' %}
{%- endif %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""
FEATURES = """{%- macro line(message, mark='-') %}
{{ mark }} {{ message.role|upper }}: {{ message.content|tojson }}
{% endmacro %}
{% set ns = namespace(count=0, last='') %}
    {% for message in messages %}
      {% if message.role == 'system' %}{% continue %}{% endif %}
      {%- set ns.count = ns.count + 1 %}
      {%- set ns.last = ns.last ~ loop.index ~ loop.length %}
{{ line(message) }}{{ line(message, mark='*' * 3) }}
      {% generation %}{{ message.content|trim }}{% endgeneration %}
    {% endfor %}
{{ ns.count }} {{ ns.last }} {% if tools is not none %}tools{% endif %} {{ 2 ** 10 }} {{ bos_token }}
{% macro boxed() %}[{{ caller('x') }}]{% endmacro %}{% call(item) boxed() %}{{ item }}{% endcall %}
"""
MESSAGES = [
    {"role": "system", "content": "Be <b>brief</b> & kind. é漢😀"},
    {"role": "user", "content": "  What's\n\t1+1? {{ 7*7 }} {% raw %} "},
    {"role": "assistant", "content": "2\n"},
    {"role": "user", "content": "Danke schön"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[1:], MESSAGES[1:2]])
@pytest.mark.parametrize("source", [CHATML, LLAMA2, FEATURES], ids=["chatml", "llama2", "features"])
def test_a_rendering_is_that_of_transformers(
    source: str, messages: list[dict[str, str]], add_generation_prompt: bool
) -> None:
    theirs, _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=add_generation_prompt, **TOKENS
    )
    ours = ChatTemplate(source, **TOKENS).render(messages, add_generation_prompt=add_generation_prompt)
    assert ours == theirs[0]


def test_the_template_knows_the_date() -> None:
    text = ChatTemplate("{{ strftime_now('%Y-%m') }}").render(MESSAGES, add_generation_prompt=False)
    assert text == dt.datetime.now().astimezone().strftime("%Y-%m")


def test_an_objection_comes_in_the_template_s_own_words() -> None:
    wrong_order = [MESSAGES[1], MESSAGES[1]]
    with pytest.raises(ChatTemplateError, match=r"^Conversation roles must alternate user/assistant/user/assistant/"):
        ChatTemplate(LLAMA2, **TOKENS).render(wrong_order, add_generation_prompt=True)


def test_roles_are_up_to_the_template() -> None:
    message = [{"role": "narrator", "content": "x"}]
    assert "<|im_start|>narrator\nx" in ChatTemplate(CHATML).render(message, add_generation_prompt=False)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"content": "x"}, r"messages\[1\]\.role must be a string, got None"),
        ({"role": "user"}, r"messages\[1\]\.content must be a string, got None"),
        ({"role": "user", "content": 3}, r"messages\[1\]\.content must be a string, got 3"),
    ],
)
def test_a_message_without_role_or_content_is_named(message: dict[str, str], named: str) -> None:
    with pytest.raises(ChatTemplateError, match=named):
        ChatTemplate(CHATML).render([MESSAGES[1], message], add_generation_prompt=True)


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ 'a' ", "{% endfor %}", "{{ 1 | no_such_filter }}", "(" * 9 + "{{" + "(" * 5000]
)
def test_a_template_that_does_not_compile_is_refused_at_once(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__self__.__class__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages|attr('__class__') }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ self.__init__ }}{{ self._TemplateReference__context }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ dict.mro() }}",
    ],
)
def test_the_sandbox_lets_nothing_out(source: str) -> None:
    """What is asked for is refused, or undefined, which writes nothing."""
    try:
        text = ChatTemplate(source).render(MESSAGES, add_generation_prompt=False)
    except ChatTemplateError:
        return
    assert text == ""


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "steps"),
        ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "recursion|steps"),
        ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}", "steps"),
        ("{% for i in range(99999) %}{{ messages[0].content * 999 }}{% endfor %}", "wrote more than"),
        ("{{ 'a' * 10 ** 10 }}", "longer than"),
        ("{{ 10 ** 10 * [0] }}", "longer than"),
        ("{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "longer than"),
        ("{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}", "longer than"),
        ("{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}", "bits"),
        ("{{ 9 ** 99999 }}", "bits"),
        ("{{ range(10 ** 9) }}", "[Rr]ange"),
        ("{{ no_such_thing.x }}", "no_such_thing"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_a_template_out_of_bounds_is_stopped(source: str, why: str) -> None:
    begin = time.perf_counter()
    with pytest.raises(ChatTemplateError, match=why):
        ChatTemplate(source).render(MESSAGES, add_generation_prompt=False)
    assert time.perf_counter() - begin < 20


def test_a_template_cannot_lift_its_budget() -> None:
    """The counter lives outside every name that a template can set."""
    source = "{% set budget = 0 %}{% set environment = 0 %}{% set pay = 0 %}{% for i in range(3) %}{{ i }}{% endfor %}"
    assert ChatTemplate(source).render(MESSAGES, add_generation_prompt=False) == "012"


def test_a_long_conversation_is_within_bounds() -> None:
    long = [{"role": "user", "content": "x" * 1000}] * 5000
    assert len(ChatTemplate(CHATML).render(long, add_generation_prompt=True)) < MAX_CHARACTERS


def test_one_template_serves_many_threads() -> None:
    """Each rendering has its own budget and its own messages."""
    template, wrong = ChatTemplate(CHATML), list[str]()

    def work(name: str) -> None:
        for _ in range(50):
            text = template.render([{"role": "user", "content": name}], add_generation_prompt=False)
            wrong.extend([text] if f"user\n{name}<" not in text else [])

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
