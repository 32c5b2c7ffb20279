//! Encodings of stored blocks.

use stillpoint_image::Codec;

/// Whether blocks of this encoding can be read.
pub(crate) fn is_known(codec: Codec) -> bool {
    match codec {
        Codec::Raw => true,
        Codec::Lz4 | Codec::Zstd => false,
    }
}
