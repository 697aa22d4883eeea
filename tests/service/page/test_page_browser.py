"""The page in a real browser: one Chromium for all tests, talking to the real service."""

import hashlib
import json
from collections.abc import Callable, Iterator

import httpx
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from gpumemnet.atomic_files import Document
from gpumemnet.gpu import VERDICT_TEXTS
from gpumemnet.units import ceil_mib
from tests.conftest import RunningService, StartService
from tests.service.page.browser import MISSING, Browser, chromium

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

Example = Callable[[str], Document]
"""An example job by name."""
Asked = Callable[..., Document]
"""What the service answers to a question."""

# Texts whose contrast with what lies behind them is below WCAG's level AA.


@pytest.fixture(scope="module")
def chrome(service: RunningService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(service.url, tmp_path_factory.mktemp("profile")) as browser:
        browser.devtools(
            "Browser.grantPermissions",
            permissions=["clipboardReadWrite", "clipboardSanitizedWrite"],
        )
        browser.open()
        browser.requested()  # its own first page is none of ours
        yield browser


@pytest.fixture
def page(chrome: Browser, service: RunningService) -> Iterator[Browser]:
    """The second tab freshly opened; afterwards nothing has been complained of, and nothing was
    asked of another host."""
    chrome.resize(1280)
    chrome.media(prefers_color_scheme="light")
    chrome.open("/#describe")
    chrome.run("sessionStorage.clear()")
    chrome.complaints()
    yield chrome
    assert chrome.complaints() == []
    foreign = [
        url
        for url in chrome.requested()
        if not url.startswith((service.url + "/", "about:", "data:"))
    ]
    assert foreign == []


@pytest.fixture
def example(http: httpx.Client) -> Example:
    return lambda name: http.get(f"/page/examples/{name}.json").json()


@pytest.fixture
def asked(http: httpx.Client) -> Asked:
    return lambda **question: http.post("/v1/predict", json=question).raise_for_status().json()


def words(amount_mib: int) -> str:
    return f"{amount_mib:,} MiB"


def has_answer(page: Browser, answer: Document) -> None:
    page.wait(
        lambda: page.text("#expected") == words(ceil_mib(answer["expected_bytes"])),
        f"{ceil_mib(answer['expected_bytes'])} MiB",
    )


def pick(page: Browser, name: str, answer: Document) -> None:
    page.find(f'[data-example="{name}"]').click()
    has_answer(page, answer)
    page.wait(
        lambda: page.run("return document.querySelector('#batch-chart svg') !== null"), "the curve"
    )


def box(page: Browser, name: str) -> WebElement:
    return page.find(f'[data-recipe="{name}"]')


def test_an_example_is_answered_with_all_its_numbers(
    page: Browser, example: Example, asked: Asked, http: httpx.Client
) -> None:
    job = example("resnet50")
    answer = asked(job=job, fits=True)
    pick(page, "resnet50", answer)
    assert page.text("#answer-gpu") == answer["gpu"]
    assert page.text("#request") == words(ceil_mib(answer["expected_bytes"]))
    assert page.text("#limit") == words(ceil_mib(answer["safe_bytes"]))
    assert "99 % of jobs" in page.text("#limit-meaning")
    assert answer["model"]["name"] in page.text("#origin")
    assert page.find("#traced").is_displayed() == (answer["label_source"] == "traced")
    assert not page.find("#reasons").is_displayed()
    lower, upper = answer["bin"]["lower_bytes"] // 2**20, answer["bin"]["upper_bytes"] // 2**20
    assert f"{lower:,} to {upper:,} MiB" in page.text("#bins-lead")
    assert len(page.driver.find_elements(By.CSS_SELECTOR, "#bins-chart .bar.most")) == 1
    assert f"limit {ceil_mib(answer['safe_bytes']):,}" in page.text("#bins-chart")

    sizes = http.post("/v1/batch-sizes", json={"job": job}).json()
    assert f"{sizes['safe_batch']:,}" in page.text("#batch-lead")
    rows = page.driver.find_elements(By.CSS_SELECTOR, "#fits-table tbody tr")
    expected = [
        fit["verdict"]
        for fit in sorted(answer["fits"], key=lambda fit: fit["available_mib"])
        if fit["mig"] is None
    ]
    assert [row.get_attribute("data-verdict") for row in rows] == expected
    assert (
        json.loads(page.run("return document.querySelector('#raw').textContent"))["expected_bytes"]
        == answer["expected_bytes"]
    )


def test_the_form_changes_the_job_and_the_answer(
    page: Browser, example: Example, asked: Asked
) -> None:
    job = example("mlp")
    pick(page, "mlp", asked(job=job))
    assert not page.find("#traced").is_displayed()
    field = page.find("#batch_size")
    field.clear()
    field.send_keys("4000")
    has_answer(page, asked(job={**job, "batch_size": 4000}))
    assert json.loads(page.value("#job"))["batch_size"] == 4000

    page.wait(
        lambda: page.run("return document.querySelectorAll('#gpu option').length > 5"),
        "the list of GPUs",
    )
    page.run(
        "for (const [id, value] of Object.entries(arguments[0])) {"
        "  const field = document.getElementById(id); field.value = value; field.dispatchEvent(new Event('change')); }",
        {"optimizer": "sgd", "gpu": "NVIDIA H200", "coverage": "0.9", "bin_width_mib": "512"},
    )
    changed = asked(
        job={**job, "batch_size": 4000, "optimizer": "sgd"},
        gpu="NVIDIA H200",
        coverage=0.9,
        bin_width_mib=512,
    )
    has_answer(page, changed)
    assert page.text("#answer-gpu") == "NVIDIA H200"
    assert page.text("#limit") == words(ceil_mib(changed["safe_bytes"]))


def test_a_pasted_request_body_sets_the_form(page: Browser, example: Example, asked: Asked) -> None:
    question = {"job": example("cnn"), "coverage": 0.9, "gpu": "NVIDIA L4"}
    page.run(
        "const text = document.getElementById('job'); text.value = arguments[0]; text.dispatchEvent(new Event('input'));",
        json.dumps(question),
    )
    has_answer(page, asked(**question))
    assert page.value("#gpu") == "NVIDIA L4"
    assert json.loads(page.value("#job")) == question["job"]


def test_a_refused_field_is_marked_and_explained(
    page: Browser, example: Example, asked: Asked
) -> None:
    pick(page, "mlp", asked(job=example("mlp")))
    field = page.find("#batch_size")
    field.clear()
    field.send_keys("0")
    page.wait(lambda: page.find("#batch_size-error").is_displayed(), "the message")
    assert "must be between 1 and" in page.text("#batch_size-error")
    assert field.get_attribute("aria-invalid") == "true"
    field.send_keys(Keys.BACKSPACE + "8")
    has_answer(page, asked(job={**example("mlp"), "batch_size": 8}))
    assert not page.find("#batch_size-error").is_displayed()
    assert not page.find("#stale").is_displayed()


def test_outside_the_support_no_number_is_offered(
    page: Browser, example: Example, asked: Asked
) -> None:
    job = example("r3d18") | {"gradient_accumulation": 64}
    answer = asked(job=job)
    page.run("document.getElementById('job').value = arguments[0];", json.dumps(job))
    page.find("#job-form button[type=submit]").click()
    has_answer(page, answer)
    assert page.text("#limit") == "None"
    assert "conv3d" in page.text("#reasons")
    assert "\ngradient_accumulation is 64" in page.text(
        "#reasons"
    )  # the name of a field begins with no capital
    assert "guess" in page.text("#result .eyebrow").lower()
    assert page.driver.find_elements(By.CSS_SELECTOR, "#bins-chart .limit-line") == []
    for name in ("hami", "volcano", "kai", "sbatch"):
        assert "no limit" in box(page, name).text
        assert str(ceil_mib(answer["expected_bytes"])) not in box(page, name).text
        assert box(page, name).find_elements(By.CSS_SELECTOR, "button, pre") == []
    verdicts = {
        row.get_attribute("data-verdict")
        for row in page.driver.find_elements(By.CSS_SELECTOR, "#fits-table tbody tr")
    }
    assert verdicts == {"unknown"}
    chances = page.run(
        "return [...document.querySelectorAll('#fits-table tbody td:last-child')].map((cell) => cell.textContent)"
    )
    assert set(chances) == {"–"}  # a chance beside "unknown" would contradict it
    assert VERDICT_TEXTS["unknown"] in page.text("#fits-table tbody")


def test_the_link_holds_the_whole_question(page: Browser, example: Example, asked: Asked) -> None:
    job = example("transformer")
    page.wait(
        lambda: page.run("return document.querySelectorAll('#gpu option').length > 5"),
        "the list of GPUs",
    )
    page.run("document.getElementById('gpu').value = 'NVIDIA L40S'")
    answer = asked(job=job, gpu="NVIDIA L40S")
    pick(page, "transformer", answer)
    page.wait(lambda: "#" in page.driver.current_url, "the fragment")
    page.open(page.driver.current_url.removeprefix(page.url))
    has_answer(page, answer)
    assert page.value("#gpu") == "NVIDIA L40S"
    assert json.loads(page.value("#job")) == job
    page.open("/#znonsense")
    page.wait(lambda: "cut off" in page.text("#failure"), "the message")


def test_a_model_is_picked_by_its_name(page: Browser, http: httpx.Client) -> None:
    def has_fit(**question: object) -> Document:
        answer = http.post("/v1/fit", json=question).raise_for_status().json()
        expected = f"{answer['expected_bytes'] / 2**30:,.3g} GiB"
        page.wait(lambda: page.text("#fit-expected") == expected, expected)
        return dict(answer)

    page.open()
    assert page.find("#tab-model").get_attribute("aria-selected") == "true"
    model = page.find("#fit-model")
    model.send_keys("qwen3 8b")
    page.wait(lambda: page.find("#fit-models").is_displayed(), "the suggestions")
    model.send_keys(Keys.ARROW_DOWN)
    active = model.get_attribute("aria-activedescendant")
    assert page.find(f"#{active}").get_attribute("aria-selected") == "true"
    model.send_keys(Keys.ENTER)
    asked: Document = {"model": "Qwen/Qwen3-8B"}
    has_fit(**asked)
    assert not page.find("#fit-models").is_displayed()
    page.wait(lambda: "(" in page.text("#fit-gpu option:nth-child(2)"), "the list of GPUs")
    page.run(
        "for (const [id, value] of Object.entries(arguments[0])) {"
        "  const field = document.getElementById(id); field.value = value; field.dispatchEvent(new Event('change')); }",
        {"fit-method": "qlora", "fit-gpu": "RTX-4090"},
    )
    page.find("#fit-sequence_length").send_keys("8192")
    asked |= {"method": "qlora", "gpu": "RTX-4090", "sequence_length": 8192}
    answer = has_fit(**asked)
    assert page.text("#fit-verdict").endswith(VERDICT_TEXTS[answer["verdict"]])
    rows = page.driver.find_elements(By.CSS_SELECTOR, "#fit-table tbody tr")
    assert len(rows) == len(answer["table"])
    parts = [size for size in answer["parts"].values() if size]
    assert len(page.driver.find_elements(By.CSS_SELECTOR, "#fit-parts li")) == len(parts)
    assert json.loads(page.run("return document.querySelector('#fit-raw').textContent")) == answer

    link = page.driver.current_url.removeprefix(page.url)
    assert "sequence_length=8192" in link
    page.open(link)
    has_fit(**asked)
    assert not answer["fits"]
    page.find("#fit-changes button").click()
    page.wait(lambda: "✓" in page.text("#fit-verdict"), "the change that makes it fit")

    batch = page.find("#fit-batch_size")
    batch.clear()
    batch.send_keys("0")
    page.wait(lambda: page.find("#fit-batch_size-error").is_displayed(), "the message")
    assert batch.get_attribute("aria-invalid") == "true"
    page.find("#tab-model").send_keys(Keys.ARROW_RIGHT)
    assert page.find("#job").is_displayed()
    assert not page.find("#fit-form").is_displayed()


def test_an_error_of_the_job_is_not_covered(page: Browser) -> None:
    """What lies at the middle of the message is the message."""
    for height in (900, 720):
        page.resize(1280, height)
        page.open("/#describe")
        page.find("#job").send_keys('{"family": ')
        page.wait(lambda: page.find("#job-error").is_displayed(), "the message")
        assert page.run(
            "const place = document.getElementById('job-error'); const at = place.getBoundingClientRect();"
            "return document.elementFromPoint(at.left + 5, at.top + at.height / 2) === place"
        )


def test_by_keyboard_alone(page: Browser, example: Example, asked: Asked) -> None:
    def press(*keys: str) -> None:
        ActionChains(page.driver, duration=0).send_keys(*keys).perform()

    def tab_to(selector: str) -> None:
        for _ in range(60):
            press(Keys.TAB)
            here = page.driver.switch_to.active_element
            if page.run("return arguments[0].matches(arguments[1])", here, selector):
                assert (
                    page.run("return getComputedStyle(arguments[0]).outlineStyle", here) != "none"
                ), selector
                return
        raise AssertionError(f"{selector} is not reached")

    press(Keys.TAB)
    assert page.driver.switch_to.active_element.text == "Skip to the answer"
    tab_to('[data-example="cnn"]')
    press(Keys.ENTER)
    job = example("cnn")
    has_answer(page, asked(job=job))
    tab_to("#batch_size")
    press(Keys.CONTROL, "a", Keys.NULL, "64", Keys.ENTER)
    has_answer(page, asked(job={**job, "batch_size": 64}))
    for selector in (
        "#optimizer",
        "#precision",
        "#gpu",
        "#coverage",
        "#bin_width_mib",
        "#job",
        "[type=submit]",
        "#copy-link",
    ):
        tab_to(selector)
    tab_to("#bins-table, details summary")
    press(Keys.ENTER)
    assert page.find("#bins-table").is_displayed()
    tab_to('button[data-kind="mig"]')
    press(" ")
    kinds = page.run(
        "return [...document.querySelectorAll('#fits-table tbody tr')].map((row) => row.dataset.kind)"
    )
    assert set(kinds) == {"mig"}
    tab_to('[data-column="probability"] button')
    press(Keys.ENTER)
    assert page.find('[data-column="probability"]').get_attribute("aria-sort") == "ascending"
    tab_to('[data-recipe="curl"] button')


def test_a_screen_reader_hears_the_answer_and_every_control_has_a_name(
    page: Browser, example: Example, asked: Asked
) -> None:
    answer = asked(job=example("mlp"))
    page.open("/?model=Qwen/Qwen3-8B")
    page.wait(lambda: "GiB safe" in page.text("#fit-status"), "what a screen reader hears")
    assert nameless_controls(page) == []
    page.open("/#describe")
    pick(page, "mlp", answer)
    status = page.find("#status")
    assert (status.get_attribute("role"), status.get_attribute("aria-live")) == ("status", "polite")
    assert words(ceil_mib(answer["safe_bytes"])) in status.text
    assert nameless_controls(page) == []


def nameless_controls(page: Browser) -> list[Document]:
    """The controls that a screen reader cannot name."""
    nodes = page.devtools("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "combobox", "spinbutton", "link", "image", "tab", "checkbox"}
    controls = [node for node in nodes if node.get("role", {}).get("value") in roles]
    assert len(controls) > 15
    return [
        node for node in controls if not node["ignored"] and not node.get("name", {}).get("value")
    ]


def test_a_key_is_asked_for_and_kept_in_this_tab_alone(
    chrome: Browser, start_service: StartService, example: Example, asked: Asked
) -> None:
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("reporter", "asker")}
    keys = f"reporter:observe:{digests['reporter']},asker:predict:{digests['asker']}"
    with start_service(GPUMEMNET_API_KEYS=keys, GPUMEMNET_DATABASE_URL="off") as guarded:
        page = Browser(chrome.driver, guarded.url)
        page.open("/#describe")
        page.wait(lambda: page.find("#key-panel").is_displayed(), "the field")
        for height in (900, 720):
            page.resize(1280, height)
            assert page.run(
                "return document.querySelector('[type=submit]').getBoundingClientRect().bottom <= innerHeight"
            )
        for refused in ("nobody", "reporter"):
            page.find("#key").clear()
            page.find("#key").send_keys(refused + Keys.ENTER)
            page.wait(
                lambda: page.find("#key-error").is_displayed() and "key" in page.text("#key-error"),
                "the refusal",
            )
        page.find("#key").clear()
        page.find("#key").send_keys("asker" + Keys.ENTER)
        page.wait(lambda: not page.find("#key-panel").is_displayed(), "the key taken")
        pick(page, "mlp", asked(job=example("mlp")))
        assert "$GPUMEMNET_API_KEY" in page.run(
            "return document.querySelector('[data-recipe=curl] code').textContent"
        )
        assert "asker" not in page.driver.page_source
        stored = (
            "return [Object.values(sessionStorage), Object.values(localStorage), document.cookie]"
        )
        assert page.run(stored) == [["asker"], [], ""]
        assert chrome.complaints() == []
        chrome.open()
        chrome.requested()
