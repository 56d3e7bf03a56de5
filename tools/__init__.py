"""What keeps the pages true: the table of rooms, the generated parts of pages, the recording of the terminal."""
