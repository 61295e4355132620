from cli import in_a_folder_of_its_own  # noqa: F401 - of each test here
