"""Story skeletons: each writes a question and as many worked steps as a `Story` asks for, one to four."""

from benchmarks.small_model.stories import measures, money, people, things

ALL = (*things.STORIES, *people.STORIES, *money.STORIES, *measures.STORIES)
"""Every skeleton."""
