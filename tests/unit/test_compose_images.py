"""What of this machine's pip configuration a build of an image is given."""

from scripts.compose.images import pip_options


def test_the_environment_counts_last_and_folders_of_this_machine_are_left_out() -> None:
    listed = "\n".join(
        [
            ":env:.timeout='180'",
            "global.timeout='15'",
            "global.index-url='https://pypi.example.org/simple'",
            "global.extra-index-url='file:///srv/simple https://more.example.org/simple'",
            "install.find-links='/srv/wheels'",
        ]
    )
    assert dict(pip_options(listed)) == {
        "timeout": "180",
        "index-url": "https://pypi.example.org/simple",
        "extra-index-url": "https://more.example.org/simple",
        "find-links": "/srv/wheels",
    }


def test_an_index_that_is_a_folder_is_no_index() -> None:
    assert dict(pip_options("global.index-url='file:///srv/simple'")) == {}
