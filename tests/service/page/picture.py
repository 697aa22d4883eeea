"""Makes a picture of the page with the answer to an example; by default
docs/pictures/page_desktop.png.

python -m tests.service.page.picture [--out FILE] [--example NAME] [--width 1280] [--height 1600]
[--dark]
"""

import argparse
import base64
import tempfile
from pathlib import Path

from tests.conftest import running_service
from tests.service.page.browser import chromium

ROOT = Path(__file__).parents[3]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures" / "page_desktop.png")
    parser.add_argument("--example", default="gpt2_small")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=1600)
    parser.add_argument("--dark", action="store_true")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_service(Path(folder) / "log") as service,
        chromium(service.url, Path(folder) / "profile") as page,
    ):
        page.media(
            prefers_color_scheme="dark" if arguments.dark else "light",
            prefers_reduced_motion="reduce",
        )
        page.resize(arguments.width, arguments.height, is_mobile=arguments.width < 500)
        page.devtools("Emulation.setScrollbarsHidden", hidden=True)
        page.open()
        page.find(f'[data-example="{arguments.example}"]').click()
        drawn = "return ['#bins-chart svg', '#batch-chart svg'].every((each) => document.querySelector(each))"
        page.wait(lambda: page.run(drawn), "the charts")
        page.run("scrollTo(0, 0)")
        arguments.out.write_bytes(
            base64.b64decode(page.devtools("Page.captureScreenshot", format="png")["data"])
        )


if __name__ == "__main__":
    main()
