//! Sets the shared library's name for the dynamic linker, and keeps the library loaded after
//! dlclose: the code of its threads and thread-local destructors must stay mapped.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,librtrs.so.0");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
