"""The scalar language between ATen and generated code: each ATen operator is defined once, engines print it."""
