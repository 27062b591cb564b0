"""What `tinsmith demo` shows: a real model learns two things, and a crash loses nothing."""
