//! Sets the shared library's name for the dynamic linker, and keeps the library loaded after
//! dlclose: its threads and thread-local values must not lose their code.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,librtrs.so.0");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
